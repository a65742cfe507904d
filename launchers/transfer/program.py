"""The program that runs on the hosts, made from the modules that this side runs too, and the conversation with it."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from orc.launchers.errors import BackendError, BackendUnreachable, BundleError, LaunchError
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import CommandTimeout, Process, Transport
from orc.launchers.transfer.wire import PIECE, Channel, Message, WireError

ANSWER_S = 30.0  # of silence on a channel, after which the host is given up; working, it says so more often

PRESENCE = Program("snapshot.presence", ("strict_modes",))
_SHARED = (
    *("errors", "snapshot.hashing", "snapshot.manifest", "snapshot.presence", "strict_modes", "snapshot.tree_store"),
    *("transfer.wire", "orc.runtime.names"),
)
_SYNC = Program("transfer.remote_store", (*_SHARED, "transfer.peers"))
_COLLECT = Program("transfer.remote_store", (*_SHARED, "snapshot.gc"))


class Conversation:
    """The program on one host, started and talked to over one channel. Raises `LaunchError` that name the host."""

    def __init__(self, transport: Transport, host: str, *, python: str = "python3", collecting: bool = False) -> None:
        self.host = host
        self._python = python
        self._mute = False  # it does not answer any more
        self._process: Process = transport.stream_program(
            _COLLECT if collecting else _SYNC, python=python, timeout_s=ANSWER_S
        )
        self.channel = Channel(lambda size: self._process.read(min(size, PIECE)), self._process.write, preface=b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, LaunchError) and not self._mute:
            with suppress(LaunchError):  # let it clean up before it is ended
                self.hang_up()
                self._process.wait()
        self._process.__exit__(kind, error, trace)

    def hang_up(self) -> None:
        """Let the program end by itself, which it does when it hears that nothing more comes. From any thread."""
        # Where another thread is writing at this moment, it is that one which fails.
        with suppress(OSError, ValueError):
            self._process.close_stdin()

    def tell(self, op: str, body: bytes = b"", **head: Any) -> None:
        """Send a message. Raises `LaunchError`."""
        try:
            self.channel.send(op, body, **head)
        except (BackendError, WireError) as error:
            raise self._explained(error) from None

    def ask(self, op: str, body: bytes = b"", **head: Any) -> Message:
        """Send a message and wait for its answer. Raises `LaunchError`."""
        self.tell(op, body, **head)
        return self.answer()

    def answer(self) -> Message:
        """The next answer; that the host is busy is none. Raises `LaunchError`."""
        try:
            while (message := self.channel.receive()).op == "busy":
                continue
        except (BackendError, WireError) as error:
            raise self._explained(error) from None
        if message.op == "error":
            head = message.head
            raise BundleError(str(head["what"]), where=f"{self.host}: {head['where']}", hint=str(head["hint"]))
        return message

    def why(self, error: BackendError) -> LaunchError:
        """Why it does not listen any more: what it said before it ended, otherwise *error*, which writing raised."""
        if isinstance(error, CommandTimeout):
            return self._explained(error)
        self.hang_up()
        try:
            self.answer()
        except LaunchError as said:
            return said
        return self._explained(error)

    def _explained(self, error: LaunchError | WireError) -> LaunchError:
        """What the host said last, where it said something."""
        what = error.what if isinstance(error, LaunchError) else str(error)
        cut = BackendUnreachable(f"the sync was cut off: {what}", where=self.host, hint="Try again.")
        if isinstance(error, CommandTimeout):
            self._mute = True
            return cut
        try:
            self.hang_up()
            ended = self._process.wait()
        except LaunchError:
            self._mute = True
            return cut
        said = ended.stderr.strip().rpartition("\n")[2]
        if ended.status == 127:
            return BackendError(
                f"{self._python}: command not found",
                where=self.host,
                hint="Set `python:` of the cluster or the host to a Python 3.9 or newer that is there.",
            )
        if said.startswith("orc: this is Python"):
            return BackendError(
                said.removeprefix("orc: "), where=self.host, hint="Set `python:` of the cluster or the host."
            )
        if ended.status > 0 and said and not said.startswith("orc: "):
            return BackendError(f"the sync failed: {said}", where=self.host)
        return BackendUnreachable(f"the sync was cut off: {said.removeprefix('orc: ') or what}", where=self.host)
