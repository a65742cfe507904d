"""`orc doctor`: check everything a job depends on, or the hosts of one cluster, with advice for what is wrong."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import cluster_option_for, json_option
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import display, waiting
from orc.orchestrator.cli.ui.output import duration, echo, echo_result, finding_text, size, style

if TYPE_CHECKING:
    from orc.launchers.findings import Finding
    from orc.launchers.spec.clusters import Cluster

FREE_WARNING, FREE_ERROR = 5 * 1000**3, 200 * 1000**2  # bytes


class Check(NamedTuple):
    """Line of the doctor's report."""

    name: str
    level: str  # ok, info, warning, error
    what: str
    do: str = ""


class Kind(NamedTuple):
    """Kind of cluster: whether jobs can be sent to such clusters from this machine, and what is missing."""

    kind: str
    works: bool
    what: str


# Of each kind: the modules that the machine needs, and the extras of orc that bring them.
_MODULES = {
    "local": {"torch": "runtime"},
    "kubernetes": {"kubernetes": "k8s"},
    "sagemaker": {"boto3": "aws"},
    "ssh": {"fabric": "ssh"},
    "tpu": {"google.cloud.tpu_v2": "gcp", "fabric": "ssh"},
}


def kinds() -> Iterator[Kind]:
    """Return a line for each kind of cluster, in alphabetical order; no cluster is contacted."""
    from orc.launchers.plugins import BACKENDS
    from orc.launchers.spec.clusters import read_clusters

    try:
        clusters, wrong = read_clusters()
        has_mistakes = bool(wrong)
    except LaunchError:
        clusters, has_mistakes = {}, True  # what is wrong with the file is among the checks
    for kind in BACKENDS.kinds():
        missing = {module: extra for module, extra in _MODULES.get(kind, {}).items() if not _is_installed(module)}
        of_kind = {name: cluster for name, cluster in clusters.items() if cluster.kind == kind}
        if missing:
            extras = f"pip install 'orc-launch[{','.join(missing.values())}]'"
            are = "is" if len(missing) == 1 else "are"
            yield Kind(kind, False, f"{', '.join(missing)} {are} not installed here: {extras}")
        elif kind == "slurm" and (lack := _missing_for_slurm(of_kind.values())):
            yield Kind(kind, False, lack)
        elif kind == "local":
            yield Kind(kind, True, _devices())
        elif of_kind:
            yield Kind(kind, True, f"{', '.join(of_kind)}; `orc clusters check {next(iter(of_kind))}` asks it")
        elif has_mistakes:
            yield Kind(kind, True, "no such cluster, and clusters.yaml has mistakes: see below")
        else:
            yield Kind(kind, True, f"no such cluster in clusters.yaml; {_first_entry(kind)}")


def _missing_for_slurm(clusters: Collection[Cluster]) -> str:
    """Return what is missing for every one of *clusters*, or for any there could be; empty where one can be used."""
    logins = {bool(cluster.options.get("login")) for cluster in clusters} or {True, False}
    if (True in logins and _is_installed("fabric")) or (False in logins and shutil.which("sbatch")):
        return ""
    if False not in logins:
        return "fabric is not installed here: pip install 'orc-launch[ssh]'"
    return "no sbatch here; for a login node over SSH: pip install 'orc-launch[ssh]'"


def _first_entry(kind: str) -> str:
    """Return how a first cluster of *kind* gets into clusters.yaml."""
    from orc.orchestrator.cli.commands.init import starters

    if kind == "slurm":
        login = "" if shutil.which("sbatch") else " --login HOST"
        return f"`orc clusters discover slurm{login}` writes an entry"
    return f"`orc init {kind}` has an entry to copy" if kind in starters() else "docs/reference/clusters-yaml.md"


def _is_installed(module: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _devices() -> str:
    import importlib.metadata

    from orc.launchers.agent.gpus import gpu_count

    return f"this machine, with torch {importlib.metadata.version('torch')}, GPUs: {gpu_count() or 'none'}"


def checks(deep: bool) -> Iterator[Check]:
    """All checks, in order. Each reports what goes wrong with itself, so that one broken thing hides no other."""
    for name, check in (
        ("python", _python),
        ("programs", _programs),
        ("state directory", _state),
        ("ledger", _ledger),
        ("reconciler", _reconciler),
        ("snapshots", lambda: _store(deep)),
        ("clusters", _clusters),
    ):
        yield from _guarded(name, check)


def _guarded(name: str, check: Callable[..., Iterator[Check]], *arguments: Any) -> Iterator[Check]:
    try:
        yield from check(*arguments)
    except LaunchError as error:
        where = f"{error.where}: " if error.where not in ("", name) else ""
        yield Check(name, "error", f"{where}{error.what}", error.hint)
    except OSError as error:
        yield Check(name, "error", f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))


def _python() -> Iterator[Check]:
    import importlib.metadata

    yield Check("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")
    if _is_installed("torch"):
        yield Check("torch", "ok", importlib.metadata.version("torch"))
    else:
        do = "needed here only for jobs on this machine: pip install 'orc-launch[runtime]'"
        yield Check("torch", "warning", "not installed in this environment", do)


def _programs() -> Iterator[Check]:
    """Check git, and the programs that clusters of each kind need on this machine."""
    from orc.launchers.backends import backend_class
    from orc.launchers.plugins import BACKENDS

    if path := shutil.which("git"):
        yield Check("git", "ok", path)
    else:
        yield Check("git", "warning", "not found", "without git, snapshots follow the ignore files by orc's own rules")
    for kind in BACKENDS.kinds():
        yield from _guarded(kind, lambda kind: _programs_of(kind, backend_class(kind).programs), kind)


def _programs_of(kind: str, programs: tuple[str, ...]) -> Iterator[Check]:
    found = {program: shutil.which(program) for program in programs}
    missing = [program for program, path in found.items() if path is None]
    if not found:
        return
    if not missing:
        yield Check(kind, "ok", f"{found[programs[0]]} and {len(found) - 1} more programs")
    elif len(missing) == len(found):
        yield Check(kind, "info", f"not installed; only needed for clusters of kind {kind}")
    else:
        yield Check(kind, "warning", f"missing: {', '.join(missing)}", f"install the client programs of {kind}")


def _state() -> Iterator[Check]:
    from orc.launchers.paths import state_dir

    path = state_dir()
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield Check("state directory", "error", f"{path} is not writable", "set ORC_STATE_DIR to a writable directory")
        return
    if path.stat().st_mode & 0o077:
        yield Check("state directory", "warning", f"{path} is open to other users", f"chmod 700 {path}")
    free = shutil.disk_usage(path).free
    level = "error" if free < FREE_ERROR else "warning" if free < FREE_WARNING else "ok"
    yield Check("state directory", level, f"{path}, {size(free)} free", "" if level == "ok" else "free some space")
    if crashes := sorted((path / "crashes").glob("*.txt")):
        yield Check("crash reports", "info", f"{len(crashes)}, the newest is {crashes[-1]}")


def _ledger() -> Iterator[Check]:
    from orc.orchestrator.client import Client
    from orc.orchestrator.engine.job_copies import unknown
    from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB
    from orc.orchestrator.ledger.store import JobFilter

    with Client() as client:
        database = client.workspace.ledger.database
        if database.url.startswith("sqlite:"):
            with database.read() as connection:
                problems = [row[0] for row in connection.tuples("PRAGMA integrity_check(5)") if row[0] != "ok"]
            if problems:
                yield Check("ledger", "error", "; ".join(problems), f"restore a backup of {database.url}")
                return
        states, _ = client.workspace.ledger.counts(JobFilter())
        active = sum(count for state, count in states.items() if state in ACTIVE_JOB)
        yield Check("ledger", "ok", f"{database.url}, jobs: {sum(states.values())}, under way: {active}")
        if lost := unknown(client.workspace):
            what = f"jobs that have a directory and are not in it: {len(lost)}, the newest is {lost[-1].job.id}"
            yield Check("ledger", "warning", what, "orc adopt")
        if network := getattr(database, "network", None):
            what = f"on {network}, a network file system: commands wait for each other (no WAL there)"
            do = "point ORC_STATE_DIR to a local disk, or share a PostgreSQL ledger (ORC_LEDGER_URL)"
            yield Check("ledger", "info", what, do)


def _reconciler() -> Iterator[Check]:
    from orc.orchestrator.client import Client
    from orc.orchestrator.engine import detached

    with Client(reconciler=False) as client:
        log, ledger = client.workspace.state_dir / detached.LOG_NAME, client.workspace.ledger
        process = detached.Lease(client.workspace.state_dir, ledger.database.url).holder()
        live = ledger.any_active()
    if process is not None:
        last = f"last pass {duration(time.time() - process.pass_at)} ago" if process.pass_at else "in its first pass"
        what = f"process {process.pid} on {process.host}, {last}, live jobs: {process.live}"
        yield Check("reconciler", "ok", f"{what}, log {log}")
    elif detached.is_switched_off():
        what = f"switched off by {detached.VARIABLE}: `orc status` takes the steps that are due"
        yield Check("reconciler", "info", what)
    elif live:
        do = f"any command that shows jobs starts one, like `orc list`; why it ended: {log}"
        yield Check("reconciler", "warning", "none, although jobs are live", do)
    else:
        yield Check("reconciler", "ok", "none, as no job is live")


def _store(deep: bool) -> Iterator[Check]:
    from orc.launchers.paths import state_dir
    from orc.launchers.snapshot.content_store import ContentStore

    store = ContentStore(state_dir() / "store")
    trees = store.root / "trees"
    digests = sorted(entry.name for entry in trees.iterdir() if entry.is_dir()) if trees.is_dir() else []
    findings = [finding for digest in digests if deep for finding in store.verify(digest)]
    for finding in findings:
        yield Check("snapshots", finding.level, finding.what, finding.hint)
    if not findings:
        verified = "verified" if deep else "not verified; --deep reads them all"
        unused = _of_no_job(digests)
        what = f"{len(digests)} in {store.root}" + (f", {unused} of no job" if unused else "")
        yield Check("snapshots", "ok", f"{what}, {verified}" if digests else what)


def _of_no_job(digests: list[str]) -> int:
    """Return the number of snapshots that no job of the ledger was made from: of rejected submissions, for example."""
    import json

    from orc.orchestrator.client import Client
    from orc.orchestrator.ledger.database import LedgerError

    try:
        with Client() as client, client.workspace.ledger.database.read() as connection:
            rows = connection.tuples("SELECT DISTINCT digests FROM jobs")
    except LedgerError:
        return 0  # the check of the ledger says what is wrong with it
    return len(set(digests) - {digest for (text,) in rows for digest in json.loads(text).values()})


def _clusters() -> Iterator[Check]:
    from orc.launchers.spec.clusters import read_clusters

    clusters, wrong = read_clusters()
    for name in dict.fromkeys([*clusters, *wrong]):  # a bad entry shows as what is wrong with it
        yield from _guarded(f"cluster {name}", _cluster, name)


def _cluster(name: str) -> Iterator[Check]:
    from orc.orchestrator.cli.commands.clusters import check

    label, findings = f"cluster {name}", check(name)
    for finding in findings:
        where = f"{finding.where}: " if finding.where not in ("", label) else ""
        yield Check(label, finding.level, f"{where}{finding.what}", finding.hint)
    if not any(finding.level in ("warning", "error") for finding in findings):
        yield Check(label, "ok", "can take jobs")


@click.command("doctor")
@click.option("--deep", is_flag=True, help="Read all snapshots and compare them with their digests.")
@cluster_option_for("Examine this cluster's hosts instead.")
@click.option("--network/--no-network", default=True, help="With --cluster: try every pair and an all-reduce.")
@click.option("--all", "every", is_flag=True, help="Show every check, also those without a finding.")
@click.option("--exclude-bad", is_flag=True, help="With --cluster: keep jobs off the hosts found bad.")
@json_option
def doctor_command(
    deep: bool, cluster: str | None, network: bool, every: bool, exclude_bad: bool, as_json: bool
) -> int:
    """Show the kinds of cluster that this machine can send jobs to, and check their requirements.

    The checks: Python, torch, git, Slurm, the state directory, the ledger, the snapshots and the clusters.
    With --cluster the hosts of one cluster are examined: reachability, clocks, disks, versions, GPUs, who can talk to
    whom, and how fast an all-reduce over all of them is. Exit status 1 when something is in error.
    """
    if cluster is not None:
        return _examine(cluster, network=network, exclude_bad=exclude_bad, as_json=as_json)
    if exclude_bad or not network:
        raise click.UsageError("--no-network and --exclude-bad need --cluster NAME", click.get_current_context())
    with waiting("checking this machine and the clusters"):
        found = list(checks(deep))
    failed = any(check.level == "error" for check in found)
    if as_json:
        told = [kind._asdict() for kind in kinds()]
        output.echo_json({"ok": not failed, "kinds": told, "checks": [check._asdict() for check in found]})
        return int(failed)
    lines = [(kind.kind, _answer("works" if kind.works else "missing"), kind.what) for kind in kinds()]
    echo(output.table(("KIND", "HERE", "CLUSTERS"), lines))
    # The line of its kind says that torch is missing; for clusters elsewhere it need not be here.
    wrong = [check for check in found if check.level in ("warning", "error") and check.name != "torch"]
    if shown := found if every else wrong:
        echo()
        echo(output.table(("", "WHAT", "FINDING"), [(_answer(check.level), check.name, check.what) for check in shown]))
    for check in shown:
        if check.do and check.level in ("warning", "error"):
            echo(f"\n{check.name}: {check.do}")
    if not every:
        count = f"{len(found)} check{'s' if len(found) != 1 else ''}"
        echo(f"\n{count}, {len(wrong) or 'nothing'} wrong; `orc doctor --all` shows each")
    return int(failed)


def _answer(word: str) -> str:
    colours = {"missing": "yellow", "warning": "yellow", "error": "red", "bad": "red", "info": None}
    return style(word, fg=colours.get(word, "green"))


# -- the hosts of one cluster, each alone and all together


def _examine(name: str, *, network: bool, exclude_bad: bool, as_json: bool) -> int:
    """Examine the cluster *name*, show what was found, and return the exit status. Raises `LaunchError`."""
    from orc.launchers.backends import open_backend
    from orc.launchers.backends.base import SupportsHostSurvey
    from orc.launchers.hosts.diagnostics import diagnose_hosts
    from orc.launchers.spec.clusters import get_cluster
    from orc.orchestrator.cli.commands.clusters import check, findings_text

    backend = open_backend(get_cluster(name))
    if not isinstance(backend, SupportsHostSurvey):  # it has no list of hosts: the findings of the backend alone
        with waiting(f"asking {name}"):
            findings = check(name)
        document = _document(name, findings)
        echo_result(as_json, document, findings_text(findings) or f"{name}: nothing to complain about")
        return int(not document["ok"])
    with closing(backend), display(silent=as_json) as shown:
        stores = backend.stores()
        transports = {host: transport for host, (transport, _) in stores.roots.items()}
        roots = {host: root for host, (_, root) in stores.roots.items()}
        made = diagnose_hosts(transports, roots, stores.pythons, network=network, progress=shown.show)
    if exclude_bad:
        from orc.launchers.paths import state_dir
        from orc.orchestrator.engine.placement import exclude

        exclude(state_dir(), name, made.bad)
    document = {**_document(name, made.findings), "hosts": made.hosts(), "bad": dict(made.bad)}
    if as_json:
        output.echo_json({**document, "excluded": dict(made.bad) if exclude_bad else None})
        return int(not document["ok"])
    header = ("", "HOST", "PYTHON", "TORCH", "GPUS", "CPUS", "FREE", "CLOCK", "ALL-REDUCE", "BANDWIDTH", "IN NODE")
    echo("\n\n".join([output.table(header, list(map(_host_row, made.hosts()))), *map(finding_text, made.findings)]))
    if exclude_bad:
        names = ", ".join(made.bad)
        echo(f"\nexcluded from placement: {names}" if names else "\nno host is excluded from placement")
    return int(not document["ok"])


def _document(cluster: str, findings: Sequence[Finding]) -> dict[str, Any]:
    from orc.orchestrator.cli.commands.clusters import finding_dict

    ok = not any(finding.level == "error" for finding in findings)
    return {"cluster": cluster, "ok": ok, "findings": [finding_dict(finding) for finding in findings]}


def _host_row(row: dict[str, Any]) -> tuple[str, ...]:
    verdict = _answer("bad" if row["bad"] else "ok")
    if "python" not in row:  # it says nothing about itself
        return (verdict, row["host"], *["-"] * 9)
    gpus = row["gpus"]
    return (
        verdict,
        row["host"],
        row["python"],
        row["torch"] or "-",
        f"{len(gpus)} {gpus[0]['name']}" if gpus else "-",
        str(row["cpus"]),
        size(row["free_bytes"]),
        "ok" if abs(row["skew_s"]) < 1 else f"{row['skew_s']:+.0f} s",
        f"{row['latency_us'] / 1000:.2f} ms" if "latency_us" in row else "-",
        f"{row['all_reduce_mb_s']:.0f} MB/s" if "latency_us" in row else "-",
        _in_node(row),
    )


def _in_node(row: dict[str, Any]) -> str:
    """``341 of 478 GB/s``: of an all-reduce over all GPUs of the host, and what their links promise."""
    measured, promised = row.get("node_all_reduce_mb_s"), row.get("node_promised")
    if measured is None:
        return "-"
    most = f"of {promised['mb_s'] / 1000:.0f} " if promised else ""
    return f"{measured / 1000:.0f} {most}GB/s"
