"""Errors of the agent, its exit codes, and its voice on standard error."""

from __future__ import annotations

import os

EXIT_PREEMPTED = 75
EXIT_HELD = 76
EXIT_LAUNCH = 77
EXIT_BUSY = 78
EXIT_TIMEOUT = 124
EXIT_CANCELLED = 143


class Superseded(Exception):
    """A newer run owns the job; the message names it."""


class LaunchFailure(Exception):
    """Setup or start failed; the message is the reason that people read."""


def log_stderr(message: str) -> None:
    """Write one line to standard error. That may be a log on a full disk, or closed: no reason for an agent to end."""
    try:
        os.write(2, f"orc agent: {message}\n".encode("utf-8", "replace"))
    except OSError:
        pass  # nobody is left to tell
