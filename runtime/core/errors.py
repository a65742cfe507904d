"""Exceptions of the runtime. Every message names what is wrong, where, and what to do; torch-free."""

from __future__ import annotations


class OrcRuntimeError(RuntimeError):
    """Base of everything the runtime raises on purpose (configuration errors are `ConfigError`, a `ValueError`)."""


class LaunchError(OrcRuntimeError):
    """The process was started in a way that cannot work: missing or contradicting rank variables, no usable device."""


class ContextError(OrcRuntimeError):
    """The process context does not allow this: settings that contradict the ones in force, a closed process group."""


class SettingConflict(ContextError, ValueError):
    """A setting that contradicts the one that an earlier Accelerator of this process has chosen."""


class TopologyError(ContextError, ValueError):
    """A layout of the ranks that cannot be: sizes that do not make the number of ranks, an unknown dimension."""


class DistributedOperationException(OrcRuntimeError):
    """A collective was called with operands that differ between the ranks; the message lists every rank's operand.

    Raised on all of them before anything is sent that another does not expect, so that nothing hangs or is ended.
    """
