"""The argv of one rank, from script, module or command and its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec


def program_of(job: JobSpec) -> tuple[str, ...]:
    """The user's program and its arguments, verbatim; ``{python}`` stands for the node's interpreter."""
    arguments = tuple(job.argv)
    if job.script is not None:
        return ("{python}", job.script, *arguments)
    if job.module is not None:
        return ("{python}", "-m", job.module, *arguments)
    if isinstance(job.command, str):
        # As if the arguments were written behind the command; the second "sh" is the shell's $0.
        words = (job.command.rstrip() + ' "$@"', "sh", *arguments) if arguments else (job.command,)
        return ("/bin/sh", "-c", *words)
    return (*(job.command or ()), *arguments)
