"""A container that reaches files for this machine: made when it is needed, and made again where it has gone."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence

from orc.launchers.containers.http import GONE, ApiRefusal
from orc.launchers.containers.transport import Channel, ContainerTransport
from orc.launchers.errors import BackendError, BackendUnreachable

START_S = 180.0  # its image may have to be pulled
_LOOK_S = 0.25


def wait_for(done: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether *done* has become true in time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


class HelperTransport(ContainerTransport):
    """Files and commands through a helper, which *what* names for people; it stays when the transport is closed."""

    def __init__(self, name: str, python: str, what: str, where: str) -> None:
        super().__init__(name, python)
        self._what, self._where, self._ready = what, where, False

    @abc.abstractmethod
    def status(self) -> tuple[bool, str, bool]:
        """Return whether the helper runs; else why it does not (yet), and whether it never will. Makes it."""

    @abc.abstractmethod
    def start(self, command: Sequence[str]) -> Channel:
        """Start a command in the helper. Raises `ApiRefusal` where it has gone."""

    def close(self) -> None:
        """See `Transport.close`."""
        self._ready = False

    def channel(self, command: Sequence[str]) -> Channel:
        """See `ContainerTransport.channel`."""
        for last in (False, True):
            if not self._ready:
                self._open()
            try:
                return self.start(command)
            except ApiRefusal as error:
                if last or error.code not in GONE:
                    raise
                self._ready = False  # it has gone meanwhile
        raise AssertionError

    def _open(self) -> None:
        why, never = "", False

        def decided() -> bool:
            nonlocal why, never
            self._ready, why, never = self.status()
            return self._ready or never

        wait_for(decided, START_S)
        if not self._ready:
            what = f"{self._what} {self.name} does not start: {why or 'it is pending'}"
            raise (BackendError if never else BackendUnreachable)(what, where=self._where)
