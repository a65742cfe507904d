"""Commands by kind. A new one is a module here with a ``COMMAND`` attribute; nothing else changes.

Those of other packages are entry points of the group ``orc.commands``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from orc.launchers.errors import RenderError
from orc.launchers.plugins import COMMANDS

if TYPE_CHECKING:
    from orc.launchers.commands.base import Command, NodeCommand
    from orc.launchers.spec import JobSpec


def build_command(job: JobSpec) -> NodeCommand:
    """Return what each node's agent starts for *job*.

    Raises:
        RenderError: There is no such command, or it cannot carry the job; with the reason.
    """
    kind = job.launcher.kind
    if not COMMANDS.has(kind):
        raise RenderError(f"unknown command kind {kind!r}", hint=f"known kinds: {', '.join(COMMANDS.kinds())}")
    command = cast("Command", COMMANDS.load(kind))
    if reason := command.check(job):
        from orc.launchers.commands.options import Refusal
        from orc.launchers.spec.source import document_of

        where = job.name
        if isinstance(reason, Refusal):
            where = document_of(job.launcher.options, where).origin((reason.option,), key=True).where
        raise RenderError(f"launcher {kind} cannot run this job: {reason}", where=where)
    return command.build(job)
