"""Signals: blocked for the agent's whole life and taken one by one, so that nothing interrupts it half-way."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# SIGURG too: a scheduler signals every process of a step at once, and this one means nothing to the ranks.
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGURG, signal.SIGINT)
NEWS = signal.SIGUSR2  # from the link's process: something has come
_WATCHED = (signal.SIGCHLD, *ENDING, signal.SIGHUP, NEWS)
_inherited_mask: set[signal.Signals] | None = None


def take_signals() -> None:
    """Block what the agent reacts to; from now on `next_signal` delivers it. Children get the old mask back."""
    global _inherited_mask
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would reap our children behind our back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    if _inherited_mask is None:  # a forked node agent inherits what the gang has blocked
        _inherited_mask = {signal.Signals(number) for number in before}


def release_signals() -> None:
    """Undo `take_signals` (for callers that live on after having supervised)."""
    if _inherited_mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _inherited_mask)


def next_signal(timeout_s: float) -> signal.struct_siginfo | None:
    """The next blocked signal, waiting for *timeout_s* at most."""
    return signal.sigtimedwait(_WATCHED, max(0.0, timeout_s))


def ended_children(first: int = 0) -> Iterator[tuple[int, int]]:
    """Reap the children that have ended, ``(pid, wait status)``: *first* before the others.

    The kernel lists them by age. But however many end before the signal is taken, it names the one that was first: so
    a rank that fails is told from those that lose their connection to it a moment later.
    """
    if not first and (pending := signal.sigtimedwait((signal.SIGCHLD,), 0)) is not None:
        first = pending.si_pid
    for which in (first, -1) if first else (-1,):
        while True:
            try:
                pid, status = os.waitpid(which, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            yield pid, status


def signal_process(pid: int, number: int) -> bool:
    """Send a signal; False when the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group led by *pid*, if any of it is left."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
