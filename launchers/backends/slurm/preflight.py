"""Preflight: causes of a failing submission or of endless waiting. Changes nothing."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from orc.launchers.backends.slurm.queue_rows import duration
from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.findings import Finding, worst_first
from orc.launchers.oldest_python import python_problem
from orc.launchers.spec.grammar import clock

if TYPE_CHECKING:
    from orc.launchers.backends.reports import PartitionReport
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.plan import Plan
    from orc.launchers.remote.transport import Transport

# Prints what of the path exists already; fails when nothing can be made there.
_WRITABLE = (
    'd=$1; while [ ! -e "$d" ]; do d=$(dirname "$d"); done; printf %s "$d"; [ -d "$d" ] && [ -w "$d" ] && [ -x "$d" ]'
)
_LOOK = "import sys,importlib.util as u;print('%d.%d'%sys.version_info[:2],'torch' if u.find_spec('torch') else '-')"


def check(client: SlurmClient, transport: Transport, plan: Plan, root: str, cluster: str) -> list[Finding]:
    """Return the findings that need no submission; errors first."""
    found = [*_slurm(client, plan, cluster), *_root(transport, root, cluster)]
    return worst_first(found)


def _slurm(client: SlurmClient, plan: Plan, cluster: str) -> list[Finding]:
    try:
        version = client.version()
        reports = client.partitions()
    except BackendError as error:
        return [Finding.of(error, error.where or cluster)]
    default = [("", report) for report in reports if report.default]
    partitions = dict([*default, *((report.name, report) for report in reports)])
    found = [Finding("info", version, cluster)]
    found += _short(plan, cluster)
    script = next(file.content for file in plan.files if file.path.endswith(".sbatch"))
    for component in script.split("\n#SBATCH hetjob\n"):
        found += _partitions(component, partitions, cluster)
    return found


def _partitions(script: str, partitions: Mapping[str, PartitionReport], cluster: str) -> list[Finding]:
    """Return the findings about the partitions of one component of the job, or of all of it."""
    found: list[Finding] = []
    names = (_directive(script, "partition") or "").split(",")
    known = ", ".join(sorted(name for name in partitions if name))
    for name in names:
        if not name and "" not in partitions:
            found.append(Finding("error", "the cluster has no default partition", cluster, f"Set partition: {known}."))
        elif name not in partitions:
            found.append(Finding("error", f"no partition {name!r}", cluster, f"The partitions are {known}."))
        elif partitions[name].state != "up":
            what = f"partition {name or '(default)'} is {partitions[name].state}"
            found.append(Finding("warning", what, cluster, "Jobs in it wait until it is up again."))
    asked = [(name, partitions[name]) for name in names if name in partitions]
    return [*found, *_too_much(script, asked, cluster)]


def _too_much(script: str, asked: Sequence[tuple[str, PartitionReport]], cluster: str) -> Iterator[Finding]:
    """Yield requests that no partition of the job can ever serve: Slurm would let the job wait for ever."""
    nodes, limit = _directive(script, "nodes"), duration(_directive(script, "time") or "")
    shown = ", ".join(name or "(default)" for name, _ in asked)
    nodes = (nodes or "").partition("-")[0]  # of a range, what it cannot do without
    if asked and nodes.isdigit() and int(nodes) > (most := max(p.nodes for _, p in asked)):
        what = f"the job asks for {nodes} nodes, partition {shown} has {most}"
        yield Finding("error", what, cluster, "Lower resources.nodes, or choose another partition.")
    cpus = _directive(script, "cpus-per-task") or ""  # one task on each node
    known = [p.most_cpus for _, p in asked if p.most_cpus]
    if cpus.isdigit() and known and len(known) == len(asked) and int(cpus) > max(known):
        what = f"the job asks for {cpus} cores per node, the largest node of partition {shown} has {max(known)}"
        yield Finding("error", what, cluster, "Lower resources.cpus_per_proc, or choose another partition.")
    longest = [p.limit_s for _, p in asked]
    if limit and longest and all(bound is not None and limit > bound for bound in longest):
        what = f"the job asks for {clock(limit)}, partition {shown} allows {clock(max(filter(None, longest)))}"
        # A QOS may lift the limit of its partition; only Slurm knows.
        level: Literal["error", "warning"] = "warning" if _directive(script, "qos") else "error"
        yield Finding(level, what, cluster, "Lower resources.time, or choose another partition.")


def _short(plan: Plan, cluster: str) -> Iterator[Finding]:
    """Return findings on a short time limit, of which ranks get a part: Slurm's covers their grace, too."""
    config = json.loads(next(file.content for file in plan.files if file.path.endswith("/agent.json")))
    script = next(file.content for file in plan.files if file.path.endswith(".sbatch"))
    limit, deadline = duration(_directive(script, "time") or ""), config.get("deadline_s")
    if limit and deadline is not None and deadline < limit * 0.75:
        what = f"of a time limit of {clock(limit)} the ranks get {clock(deadline)}; the rest is kept for their end"
        yield Finding("warning", what, cluster, "Raise resources.time, or lower grace.")


def _directive(script: str, name: str) -> str | None:
    match = re.search(rf'^#SBATCH --{name}="?([^"\n]*)', script, re.MULTILINE)
    return match[1] if match else None


def _root(transport: Transport, root: str, cluster: str) -> list[Finding]:
    try:
        done = transport.run(("/bin/sh", "-c", _WRITABLE, "sh", transport.expand(root)), timeout_s=30)
    except BackendUnreachable as error:
        return [Finding("error", error.what, error.where or cluster, error.hint, unreachable=True)]
    if done.status == 0:
        return []
    hint = "Set `root:` of the cluster to a directory on the file system that login node and nodes share."
    return [Finding("error", f"{done.stdout or root} cannot be written", cluster, hint)]


def check_python(
    transport: Transport, python: str, modules: Sequence[str], cluster: str, *, environment: bool = False
) -> list[Finding]:
    """Return what is wrong with *python*, which may begin with ``~``. Raises `LaunchError`.

    It is asked where the cluster is entered, with the modules that jobs load: nodes usually share its file system, and
    a node cannot be asked without waiting in the queue.

    With *environment* jobs bring the Python of their ranks, and it has to start agents only.
    """
    where, note = f"cluster {cluster}", "It was looked for where the cluster is entered; jobs use the one of the nodes."
    load = f"module load {shlex.join(modules)} && " if modules else ""
    shell = ("/bin/bash", "-lc") if modules else ("/bin/sh", "-c")
    path = transport.expand(python)
    done = transport.run((*shell, f'{load}exec "$0" -c "$1"', path, _LOOK), timeout_s=60)
    version, _, torch = done.stdout.strip().rpartition("\n")[2].partition(" ")
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if done.status or len(numbers) != 2:
        message = (done.stderr.strip().splitlines() or [f"exit status {done.status}"])[-1]
        hint = "Set `python:` of the cluster to a Python of the nodes that has torch."
        return [Finding("error", f"the Python {python} cannot be started: {message}", where, f"{hint} {note}")]
    if problem := python_problem(numbers, environment=environment):
        hint = f"Set `python:` of the cluster to a newer Python of the nodes, or give jobs an `environment:`. {note}"
        return [Finding("error", f"the Python {python} is {problem}", where, hint)]
    if torch != "torch" and not environment:
        hint = f"Set `python:` of the cluster to one that has it, or give jobs an `environment:`. {note}"
        return [Finding("warning", f"the Python {python} has no torch", where, hint)]
    return []
