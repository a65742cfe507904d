"""The receiver on one host, started and talked to over one channel."""

from __future__ import annotations

import io
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from orc.launchers.agent.messages import encode_message
from orc.launchers.errors import BackendError, BackendUnreachable, BundleError, LaunchError
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import CommandTimeout, Process, Transport
from orc.launchers.transfer.wire import CHUNK, ByteSource, WireError, read_message, skip_greeting

ANSWER_S = 30.0  # of silence on a channel, after which the host is given up; working, it says so more often
PRESENCE = Program("snapshot.presence", ("strict_modes",))
RECEIVER = Program(
    "transfer.receiver",
    (
        *("agent.messages", "errors", "snapshot.hashing", "snapshot.manifest", "snapshot.presence"),
        *("snapshot.tree_store", "strict_modes", "transfer.wire", "orc.runtime.core.names"),
    ),
)


class ReceiverSession:
    """Conversation with the receiver on one host. Raises `LaunchError` that name the host."""

    def __init__(self, transport: Transport, host: str, python: str) -> None:
        self.host = host
        self.sent = 0  # bytes
        self._python = python
        self._silent = False  # it does not answer any more
        self._process: Process = transport.stream_program(RECEIVER, python=python, timeout_s=ANSWER_S)
        self._output = io.BufferedReader(ByteSource(self._process.read), CHUNK)
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, LaunchError) and not self._silent:
            with suppress(LaunchError):  # let it clean up before it is ended
                self.close_input()
                self._process.wait()
        self._process.__exit__(kind, error, trace)

    def close_input(self) -> None:
        """Let the program end by itself, which it does when it hears that nothing more comes. From any thread."""
        # Where another thread is writing at this moment, it is that one which fails.
        with suppress(OSError, ValueError):
            self._process.close_stdin()

    def request(self, **fields: Any) -> dict[str, Any]:
        """Send a message and return the answer. Raises `LaunchError`."""
        self.write(encode_message(fields))
        return self.answer()

    def write(self, data: bytes) -> None:
        """Send bytes. Raises the `LaunchError` that the host has reported, or that it cannot be written to."""
        self.sent += len(data)
        try:
            self._process.write(data)
        except CommandTimeout as error:
            raise self._explain(error) from None
        except BackendError as error:
            self.close_input()
            self.answer()  # what it has reported before it ended
            raise self._explain(error) from None

    def answer(self) -> dict[str, Any]:
        """Return the next message, signs of life left out. Raises `LaunchError`."""
        try:
            if not self._started:
                skip_greeting(self._output)
                self._started = True
            while "busy" in (message := read_message(self._output)):
                continue
        except (BackendError, WireError) as error:
            raise self._explain(error) from None
        if reported := message.get("error"):
            where = f"{self.host}: {reported['where']}"
            raise BundleError(str(reported["what"]), where=where, hint=str(reported["hint"]))
        return message

    def _explain(self, error: LaunchError | WireError) -> LaunchError:
        """Return the error that the program's end explains, otherwise that the transfer was cut off."""
        what = error.what if isinstance(error, LaunchError) else str(error)
        cut = BackendUnreachable(f"the sync was cut off: {what}", where=self.host, hint="Try again.")
        if isinstance(error, CommandTimeout):
            self._silent = True
            return cut
        try:
            self.close_input()
            ended = self._process.wait()
        except LaunchError:
            self._silent = True
            return cut
        last = ended.stderr.strip().rpartition("\n")[2]
        if ended.status == 127:  # a wrapper around an interpreter that is gone
            hint = "Set `python:` of the cluster or the host to a Python 3.9 or newer that is there."
            return BackendError(f"{self._python}: command not found", where=self.host, hint=hint)
        if ended.status > 0 and last and not last.startswith("orc: "):
            return BackendError(f"the sync failed: {last}", where=self.host)
        return BackendUnreachable(f"the sync was cut off: {last.removeprefix('orc: ') or what}", where=self.host)
