"""Actions beside the training, one at a time; the error of a failed one is raised at the next `Background.finish`."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable

from orc.runtime.checkpoint.errors import CheckpointError


class Background:
    """Runs one action in a thread. The interpreter does not exit before it has finished."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._what = ""
        self._pid = os.getpid()
        reference = weakref.ref(self)
        atexit.register(lambda: _tell(reference()))

    @property
    def failed(self) -> bool:
        """Return whether the action has ended with an error that `finish` has not raised yet."""
        return self._failure is not None

    @property
    def running(self) -> bool:
        """Return whether the action is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, what: str, action: Callable[[], object]) -> None:
        """Run *action*; *what* names it in errors. Call `finish` before."""
        self._what = what

        def run() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised by `finish`
                self._failure = error

        # No daemon: the end of the interpreter waits for it.
        self._thread = threading.Thread(target=run, name="orc-checkpoint", daemon=False)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the action. Raises `CheckpointError` when it failed, once."""
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._what} failed in the background: {failure}") from failure


def _tell(background: Background | None) -> None:
    if background is None or os.getpid() != background._pid:
        return
    try:
        background.finish()
    except CheckpointError as error:
        print(f"orc: {error}", file=sys.stderr, flush=True)  # noqa: T201 - nobody is left to raise it to
