"""Check of a Slurm cluster's Python: existence, version, torch.

Asked where the cluster is entered, with the modules that jobs load: nodes usually share its file system, and a node
cannot be asked without waiting in the queue.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orc.launchers.findings import Finding
from orc.launchers.oldest_python import python_problem

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport

_LOOK = "import sys,importlib.util as u;print('%d.%d'%sys.version_info[:2],'torch' if u.find_spec('torch') else '-')"


def check_python(
    transport: Transport, python: str, modules: Sequence[str], cluster: str, *, environment: bool = False
) -> list[Finding]:
    """Return what is wrong with *python*, which may begin with ``~``. Raises `LaunchError`.

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
