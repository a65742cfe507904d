"""Exceptions of the runtime. Every message names what is wrong, where, and what to do; torch-free."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence


class OrcRuntimeError(RuntimeError):
    """Base of everything the runtime raises on purpose (configuration errors are `ConfigError`, a `ValueError`)."""


class LaunchError(OrcRuntimeError):
    """The process was started in a way that cannot work: missing or contradicting rank variables, no usable device."""


class RankFailure(OrcRuntimeError, AssertionError):
    """A rank raised, died, or did not finish in time; the text has every failing rank's traceback."""


class ContextError(OrcRuntimeError):
    """The process context does not allow this: settings that contradict the ones in force, a closed process group."""


class SettingConflict(ContextError, ValueError):
    """What contradicts an earlier Accelerator of this process: a setting, or ranks that are made beside it."""


class TopologyError(ContextError, ValueError):
    """A layout of the ranks that cannot be: sizes that do not make the number of ranks, an unknown dimension."""


class DistributedOperationException(OrcRuntimeError):
    """A collective was called with operands that differ between the ranks; the message lists every rank's operand.

    Raised on all of them before anything is sent that another does not expect, so that nothing hangs or is ended.
    """


def add_note(error: BaseException, note: str) -> None:
    """Add the line *note* to *error*; in Python 3.10, whose tracebacks show no notes, to its message too."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
        return
    error.__notes__ = [*getattr(error, "__notes__", ()), note]
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def group_errors(what: str, errors: Sequence[Exception]) -> Exception:
    """Return one exception for several; in Python 3.10, which has no groups, the first with the others as notes."""
    if sys.version_info >= (3, 11):
        return builtins.ExceptionGroup(what, errors)
    for error in errors[1:]:
        add_note(errors[0], f"{what}; also {type(error).__name__}: {error}")
    return errors[0]
