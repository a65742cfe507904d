"""Causes of an attempt's end."""

from __future__ import annotations

import enum


class Cause(enum.StrEnum):
    """Cause of an attempt's end without success; the vocabulary of ``retry.on`` plus what is never retried."""

    CRASH = "crash"  # a rank exited non-zero or by a signal, or setup failed
    NODE_FAILURE = "node_failure"  # a node or its agent went away
    PREEMPTED = "preempted"  # asked to go, saved or not, should run again
    TIMEOUT = "timeout"  # time limit reached
    CANCELLED = "cancelled"  # by a person
    LAUNCH = "launch"  # could not be started at all (rejected options, missing interpreter)
