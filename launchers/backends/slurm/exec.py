"""Ways to the nodes of a running job for ``orc exec`` and ``orc top``: one more ``srun`` step of it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orc.launchers.backends.base import NodeEntry

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.options import SlurmSettings


def entries(
    settings: SlurmSettings, job_id: str, directory: str, components: Sequence[int], python: str
) -> list[NodeEntry]:
    """Return the ways to the nodes of the Slurm job *job_id*, in node order. *components* are node counts."""
    places: list[tuple[str, ...]] = []
    for component, nodes in enumerate(components):
        group = (f"--het-group={component}",) if len(components) > 1 else ()
        places += [(*group, f"--relative={node}") for node in range(nodes)]
    return [_entry(settings, job_id, directory, node, place, python) for node, place in enumerate(places)]


def _entry(
    settings: SlurmSettings, job_id: str, directory: str, node: int, place: tuple[str, ...], python: str
) -> NodeEntry:
    conf = ("env", f"SLURM_CONF={settings.conf}") if settings.conf else ()
    srun: tuple[str, ...] = (*conf, settings.program("srun"), f"--jobid={job_id}", "--overlap", "--quiet")
    if "_" in job_id:  # srun knows an element of an array by its own number only
        asked = shlex.join((settings.program("squeue"), "--noheader", "--array", f"--jobs={job_id}", "--format=%A"))
        step = f'exec {shlex.quote(settings.program("srun"))} --jobid="$({asked})" --overlap --quiet "$@"'
        srun = (*conf, "/bin/sh", "-c", step, "sh")
    where = ("--nodes=1", "--ntasks=1", *place)
    plain_step, shell = (*srun, *where, "--unbuffered"), (*srun, *where, "--pty")
    if settings.login is None:
        return NodeEntry(node, f"node {node}", directory, python, plain_step, shell)
    from orc.launchers.remote.ssh.client import ssh_argv

    spec, access = settings.login.spec(), settings.access
    # The login node's shell reads what follows its name, word by word.
    plain = (*ssh_argv(spec, access, terminal=False), *map(shlex.quote, plain_step))
    terminal = (*ssh_argv(spec, access, terminal=True), *map(shlex.quote, shell))
    return NodeEntry(node, f"node {node}", directory, python, plain, terminal, through_shell=True)
