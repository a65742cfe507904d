"""A program that runs on a host while we talk to it."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Self

from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.remote.ssh.errors import LinkLost
from orc.launchers.remote.ssh.hand import Hand
from orc.launchers.remote.ssh.remote_hand import CHUNK, WINDOW
from orc.launchers.remote.transport import CommandTimeout, Completed

_KILLED_WITHIN_S = 5.0  # a killed group has ended, or its disk hangs


class SshProcess:
    """See `Process`. One thread at a time may use it."""

    def __init__(
        self,
        hand: Hand,
        argv: Sequence[str],
        timeout_s: float,
        env: Mapping[str, str],
        *,
        drop_env: Sequence[str] = (),
        keep_env: Sequence[str] = (),
        has_input: bool = True,
        program: str | None = None,
    ) -> None:
        """*program* is one that was brought there (`Hand.bring`) and runs in a copy; *argv* goes behind its name."""
        self._argv = tuple(argv)
        self._timeout_s = timeout_s
        self._hand = hand
        self._out, self._err = bytearray(), bytearray()
        self._room = WINDOW
        self._status: int | None = None
        self._started = self._deaf = self._mute = False
        words = {"argv": list(argv)} if program is None else {"program": program, "argv": list(argv[1:])}
        self._exchange = hand.open(
            "start", **words, env=dict(env), drop=list(drop_env), keep=list(keep_env), input=has_input
        )

    def await_start(self) -> None:
        """Return when it runs. Raises `BackendError` when there is no such program."""
        while not self._started and self._status is None:
            if not self._receive(self._timeout_s):
                raise self._late(f"did not start within {self._timeout_s:g} s")

    def write(self, data: bytes) -> None:
        """See `Process.write`. What the program says meanwhile is kept, so that neither waits for the other."""
        view = memoryview(data)
        while view:
            while self._room <= 0 and not self._deaf and self._status is None:
                if not self._receive(self._timeout_s):
                    raise self._late(f"took no input for {self._timeout_s:g} s")
            if self._deaf or self._status is not None:
                raise BackendUnreachable(f"{self._name} ended before it had read all of its input", where=self._where)
            part = view[: min(CHUNK, self._room)]
            self._exchange.send({}, bytes(part))
            self._room -= len(part)
            view = view[len(part) :]

    def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        if self._status is None:
            self._exchange.send({"eof": 1})

    def read(self, size: int) -> bytes:
        """See `Process.read`."""
        while not self._out and not self._mute and self._status is None:
            if not self._receive(self._timeout_s):
                raise self._late(f"said nothing for {self._timeout_s:g} s")
        data = bytes(self._out[:size])
        del self._out[:size]
        return data

    def wait(self) -> Completed:
        """See `Process.wait`."""
        while self._status is None:
            if not self._receive(self._timeout_s):
                raise self._late(f"did not end within {self._timeout_s:g} s")
        return self._completed()

    def finish(self, stdin: bytes | None) -> Completed:
        """Give it all its input and wait for its end, *timeout_s* seconds in all; after that it is ended."""
        deadline = time.monotonic() + self._timeout_s
        view = memoryview(stdin or b"")
        while self._status is None:
            while view and self._room > 0 and not self._deaf:
                part = view[: min(CHUNK, self._room)]
                self._exchange.send({}, bytes(part))
                self._room -= len(part)
                view = view[len(part) :]
                if not view:
                    self._exchange.send({"eof": 1})
            if stdin == b"":
                self._exchange.send({"eof": 1})
                stdin = None
            left = deadline - time.monotonic()
            if left <= 0 or not self._receive(left):
                self.end()
                raise CommandTimeout(f"{self._name} did not answer within {self._timeout_s:g} s", where=self._where)
        return self._completed()

    def end(self) -> None:
        """End its process group, if it still runs, and wait until that has happened."""
        if self._status is None and self._hand.alive:
            with suppress(LinkLost):  # then the host ends it
                self._exchange.send({"kill": 1})
                deadline = time.monotonic() + _KILLED_WITHIN_S
                while self._status is None and (left := deadline - time.monotonic()) > 0:
                    self._receive(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self._hand.done(self._exchange)

    @property
    def _name(self) -> str:
        return PurePosixPath(self._argv[0]).name

    @property
    def _where(self) -> str:
        return self._hand.name

    def _late(self, how: str) -> CommandTimeout:
        return CommandTimeout(f"{self._name} {how}", where=self._where)

    def _completed(self) -> Completed:
        assert self._status is not None
        out, err = (bytes(said).decode(errors="replace") for said in (self._out, self._err))
        self._out.clear()
        return Completed(self._argv, self._status, out, err)

    def _receive(self, timeout_s: float) -> bool:
        """Wait for something from the program; false when nothing happened in *timeout_s*."""
        try:
            header, payload = self._exchange.get(timeout_s)
        except queue.Empty:
            return False
        if "error" in header:
            self._status = 127
            raise _unstarted(self._argv[0], header, self._where)
        if payload:
            (self._out if "out" in header else self._err).extend(payload)
            self._exchange.send({"ack": len(payload)})
        self._room += header.get("ack", 0)
        self._started = self._started or "started" in header
        self._deaf = self._deaf or "gone" in header
        self._mute = self._mute or header.get("shut") == "out"
        if "done" in header:
            self._status = header["done"]["status"]
        return True


def _unstarted(program: str, header: dict[str, Any], where: str) -> BackendError:
    import errno

    if header["errno"] == errno.ENOENT:
        name = PurePosixPath(program).name
        python = "Set `python:` of the cluster or the host to a Python 3.9 or newer that is there."
        hint = python if name.startswith("python") else f"Install {name} there."
        return BackendError(f"{program}: command not found", where=where, hint=hint)
    return BackendError(f"{program} could not be started: {header['error']}", where=where)
