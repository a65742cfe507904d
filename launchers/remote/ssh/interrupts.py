"""Interrupts wait for the end of a call of paramiko, which takes locks that an exception would leave taken."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class InterruptsWait:
    """Context of a short call, in which Ctrl-C waits for its end; without effect outside of the main thread."""

    def __enter__(self) -> Self:
        self._came: tuple[int, FrameType | None] | None = None
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # ignored, or of the system: nothing is raised
                self._handler = handler
                signal.signal(signal.SIGINT, self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame
