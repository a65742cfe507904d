"""Commands by kind. A new one is a module here with a ``COMMAND`` attribute; nothing else changes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, cast

from orc.launchers.errors import RenderError

if TYPE_CHECKING:
    from orc.launchers.commands.base import Command, NodeCommand
    from orc.launchers.spec import JobSpec


_NOT_KINDS = ("base", "options", "program")


def command_kinds() -> list[str]:
    """The kinds of command this installation knows, in alphabetical order; imports none of them."""
    import pkgutil

    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_KINDS)


def command_exists(kind: str) -> bool:
    """Whether this installation has a command of that kind; imports nothing."""
    return kind.isidentifier() and kind not in _NOT_KINDS and importlib.util.find_spec(f"{__name__}.{kind}") is not None


def build_command(job: JobSpec) -> NodeCommand:
    """What each node's agent starts for *job*. Raises `RenderError` with the reason when it cannot be done."""
    kind = job.launcher.kind
    if not command_exists(kind):
        raise RenderError(f"unknown command kind {kind!r}", hint=f"known kinds: {', '.join(command_kinds())}")
    command = cast("Command", importlib.import_module(f"{__name__}.{kind}").COMMAND)
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
