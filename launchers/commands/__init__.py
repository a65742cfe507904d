"""Commands by kind. A new one is a module here with a ``COMMAND`` attribute; nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from orc.launchers.errors import RenderError
from orc.launchers.plugins import COMMANDS

if TYPE_CHECKING:
    from orc.launchers.commands.base import Command, NodeCommand
    from orc.launchers.spec import JobSpec


def build_command(job: JobSpec) -> NodeCommand:
    """What each node's agent starts for *job*. Raises `RenderError` with the reason when it cannot be done."""
    kind = job.launcher.kind
    if not COMMANDS.has(kind):
        raise RenderError(f"unknown command kind {kind!r}", hint=f"known kinds: {', '.join(COMMANDS.kinds())}")
    command = cast("Command", COMMANDS.load(kind))
    if reason := command.check(job):
        raise RenderError(f"launcher {kind} cannot run this job: {reason}", where=_place(job, reason))
    return command.build(job)


def _place(job: JobSpec, reason: str) -> str:
    """Where the option that *reason* names stands in the job file; the job's name where it names none."""
    from orc.launchers.commands.options import named
    from orc.launchers.spec.source import document_of

    options = job.launcher.options
    option = named(options, reason)
    return job.name if option is None else document_of(options, job.name).origin((option,), key=True).where
