"""Exit statuses of `orc` (docs/reference/exit-codes.md)."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """Exit statuses of every command but `orc launch`, which passes on the script's own."""

    OK = 0
    JOB_FAILED = 1  # also: doctor and `clusters check` found an error
    USAGE = 2  # bad input or usage, or this machine cannot carry it out; nothing was done
    CANCELLED = 3
    NO_SUCH_JOB = 4
    UNREACHABLE = 5
    TIMED_OUT = 6
    INTERNAL = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


# Names of exception classes, so that nothing is imported to compare: the first match in the class's MRO counts.
_BY_CLASS = {
    "JobNotFound": ExitCode.NO_SUCH_JOB,
    "BackendUnreachable": ExitCode.UNREACHABLE,
    "AmbiguousSubmit": ExitCode.UNREACHABLE,
    "LaunchError": ExitCode.USAGE,
}


def of_error(error: BaseException) -> ExitCode:
    """Return the exit status for an exception that ends a command."""
    for cls in type(error).__mro__:
        if cls.__name__ in _BY_CLASS:
            return _BY_CLASS[cls.__name__]
    return ExitCode.INTERNAL


def of_states(states: Iterable[str]) -> ExitCode:
    """Return the exit status for jobs that ended in *states*: failure outranks cancellation, which outranks success."""
    seen = set(states)
    if "FAILED" in seen:
        return ExitCode.JOB_FAILED
    return ExitCode.CANCELLED if "CANCELLED" in seen else ExitCode.OK
