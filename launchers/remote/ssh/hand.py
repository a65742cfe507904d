"""Our end of the program that works for us on a host (`remote_hand`): requests, answers, programs that run there."""

from __future__ import annotations

import itertools
import json
import queue
import shlex
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orc.launchers.remote.programs import Program, source
from orc.launchers.remote.shipped import CODE
from orc.launchers.remote.ssh.errors import AccessRefused, LinkLost
from orc.launchers.remote.ssh.remote_hand import CHUNK, LENGTHS, LONGEST, MAGIC, TICK_S

if TYPE_CHECKING:
    from paramiko import Channel

Frame = tuple[dict[str, Any], bytes]
_LEAST_SILENCE_S = 3.0  # a machine under load may be that late
_LOOK_S = 1.0  # one wait for the host; where it takes twice as long, it was we who were stopped, or asleep
_HOST_PATIENCE = 2  # times as long the host waits for us, before it ends what we run there
_NOISE = 1 << 20  # bytes that a login may print before our program speaks
_PROGRAM = Program("remote.ssh.remote_hand", ("remote.files", "remote.shipped", "remote.ssh.remote_fork"))
# A copy of it that goes on as another program writes its command line over this one (`host_program`): as long as any.
_ROOM = 1000


class Exchange:
    """One request and what comes back for it."""

    def __init__(self, hand: Hand, number: int) -> None:
        self._hand = hand
        self.number = number
        self.frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """One more frame of the request. Raises `LinkLost`."""
        self._hand.send({"id": self.number, **header}, payload)

    def get(self, timeout_s: float) -> Frame:
        """The next frame. Raises `queue.Empty` after *timeout_s* seconds, `LinkLost`."""
        frame = self.frames.get(timeout=timeout_s)
        if frame is None:
            self.frames.put(None)
            raise self._hand.failure()
        return frame


class Hand:
    """The program on a host, reached through *channel*; *shut* closes the whole connection.

    Any number of threads may use it. When the host says nothing for *silence_s* seconds while it should, the
    connection is closed, and everything underway raises `LinkLost`.
    """

    def __init__(self, name: str, channel: Channel, python: str | None, silence_s: float, shut: Callable[[], None]):
        self.name = name
        self._channel = channel
        self._silence_s = max(silence_s, _LEAST_SILENCE_S)
        self._shut = shut
        self._buffer = bytearray()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._open: dict[int, Exchange] = {}
        self._failure = ""
        self._brought: dict[Program, str] = {}
        self._bringing = threading.Lock()
        self.heard = self._spoke = time.monotonic()
        channel.settimeout(_LOOK_S)
        # paramiko waits for the answer without a limit.
        limit = threading.Timer(self._silence_s, self._fail, ("no session was opened in time",))
        limit.daemon = True
        limit.start()
        try:
            channel.exec_command(_command(python, self._silence_s * _HOST_PATIENCE))
        except Exception as error:
            if self._failure:
                raise self.failure() from error
            raise
        finally:
            limit.cancel()
        try:
            self._write(b"".join(_pieces()))
        except LinkLost as lost:  # a shell that has no Python for us may have ended before we had sent it all
            raise self._unstarted(lost) from None
        self.hello = self._greeted()
        threading.Thread(target=self._listen, name=f"orc-ssh-{name}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether nothing has gone wrong yet."""
        return not self._failure

    def failure(self) -> LinkLost:
        """Why it cannot be used any more."""
        return LinkLost(self._failure, where=self.name)

    def open(self, op: str, payload: bytes = b"", **fields: Any) -> Exchange:
        """Send a request. Call `done` with what is returned. Raises `LinkLost`."""
        with self._lock:
            if self._failure:
                raise self.failure()
            if not self._open:
                self.heard = time.monotonic()  # the host was free to be silent
            exchange = Exchange(self, next(self._numbers))
            self._open[exchange.number] = exchange
        try:
            self.send({"id": exchange.number, "op": op, **fields}, payload[:CHUNK])
            for begin in range(CHUNK, len(payload), CHUNK):
                exchange.send({}, payload[begin : begin + CHUNK])
        except BaseException:
            self.done(exchange)
            raise
        return exchange

    def done(self, exchange: Exchange) -> None:
        """Nothing more is expected for it."""
        with self._lock:
            self._open.pop(exchange.number, None)

    def ask(self, op: str, payload: bytes = b"", *, timeout_s: float, **fields: Any) -> Frame:
        """A request with one answer: its fields and its payload.

        Raises `OSError` as it happened there, `LinkLost`, and `queue.Empty` when nothing comes for *timeout_s* seconds.
        """
        exchange = self.open(op, payload, **fields)
        parts = []
        try:
            while True:
                header, part = exchange.get(timeout_s)
                if "error" in header:
                    raise OSError(header["errno"] or 0, header["error"])
                parts.append(part)
                if "done" in header:
                    return header["done"], b"".join(parts)
        finally:
            self.done(exchange)

    def bring(self, program: Program) -> str:
        """The name by which *program*, which is sent if it was not yet, can be started there. Raises `LinkLost`."""
        with self._bringing:
            name = self._brought.get(program)
            if name is None:
                name = self._brought[program] = f"{program.module} {len(self._brought)}"
                self.send({"op": "program", "name": name}, program.packed(self.hello["code"]))
        return name

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """One frame. Raises `LinkLost`."""
        text = json.dumps(header).encode()
        self._write(LENGTHS.pack(len(text), len(payload)) + text + payload)

    def close(self) -> None:
        """Close the connection; the host ends what still runs there for us."""
        self._fail("the connection was closed")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._sending:
            self._spoke = began = time.monotonic()
            quiet_s = 0.0
            while view:
                if self._failure:
                    raise self.failure()
                try:
                    view = view[self._channel.send(view) :]
                    self._spoke = began = time.monotonic()
                    quiet_s = 0.0
                except TimeoutError:
                    quiet_s += min(time.monotonic() - began, 2 * _LOOK_S)
                    began = time.monotonic()
                    if quiet_s > self._silence_s:
                        self._fail(f"it took nothing for {self._silence_s:g} s")
                except (OSError, EOFError):  # what paramiko raises for a closed channel, and a closed connection
                    self._fail("the connection was cut")

    def _fail(self, why: str) -> None:
        with self._lock:
            if self._failure:
                return
            self._failure = why
            waiting = list(self._open.values())
        for exchange in waiting:
            exchange.frames.put(None)
        self._shut()

    def _greeted(self) -> dict[str, Any]:
        """Read past what the login printed, until our program has introduced itself."""
        deadline = time.monotonic() + 3 * self._silence_s
        while True:
            begin = self._buffer.find(MAGIC)
            if begin >= 0:
                del self._buffer[: begin + len(MAGIC)]
                break
            if len(self._buffer) > _NOISE:
                raise AccessRefused(
                    "the login prints so much that nothing else can be heard",
                    where=self.name,
                    hint="Look for programs that print in ~/.bashrc (or the like) there.",
                )
            self._greeting(deadline)
        while (frame := self._take()) is None:
            self._greeting(deadline)
        return frame[0]

    def _greeting(self, deadline: float) -> None:
        try:
            data = self._channel.recv(CHUNK)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise LinkLost("the login worked, but no program starts there", where=self.name) from None
            return
        if not data:
            raise self._unstarted()
        self._buffer += data

    def _unstarted(self, lost: LinkLost | None = None) -> LinkLost | AccessRefused:
        """Why there is no program at the other end; *lost* where nobody there has said so."""
        said = b""
        try:
            while part := self._channel.recv_stderr(CHUNK):
                said += part
        except (OSError, EOFError):
            said += b""  # cut off
        # The end of its output may be told some time before its status; that of the connection ends the wait.
        if not self._channel.status_event.wait(self._silence_s) or self._channel.exit_status < 0:
            return lost or LinkLost("the connection was cut", where=self.name)
        text = said.decode(errors="replace").strip().splitlines()
        return AccessRefused(
            f"orc's program could not be started there (status {self._channel.exit_status})"
            + (f": {text[-1][:300]}" if text else ""),
            where=self.name,
            hint="A host needs Python 3.9 or newer: `python3` on the PATH, or `python:` of the cluster or the host.",
        )

    def _listen(self) -> None:
        awake = time.monotonic()
        while not self._failure:
            began = time.monotonic()
            try:
                data = self._channel.recv(CHUNK)
                while self._channel.recv_stderr_ready():
                    self._channel.recv_stderr(CHUNK)
            except TimeoutError:
                data = None
            except (OSError, EOFError):  # the latter where paramiko cannot say any more that there is room again
                data = b""
            now = time.monotonic()
            if now - began > 2 * _LOOK_S:
                awake = now
            if data == b"":
                self._fail("the connection was cut")
            elif data:
                self.heard = now
                self._buffer += data
                try:
                    while (frame := self._take()) is not None:
                        self._deliver(frame)
                except ValueError:
                    self._fail("it sent what cannot be understood")
            if not self._open:
                continue
            if now - max(self.heard, awake) > self._silence_s:
                self._fail(f"it has been silent for {self._silence_s:g} s")
            elif now - self._spoke > TICK_S and self._channel.send_ready() and not self._sending.locked():
                self._tick()

    def _tick(self) -> None:
        try:
            self.send({"tick": 1})
        except LinkLost:
            return  # everybody who waits has been told

    def _take(self) -> Frame | None:
        """The next whole frame of what has arrived."""
        if len(self._buffer) < LENGTHS.size:
            return None
        header, payload = LENGTHS.unpack_from(self._buffer)
        if header + payload > LONGEST:
            raise ValueError
        begin, end = LENGTHS.size + header, LENGTHS.size + header + payload
        if len(self._buffer) < end:
            return None
        frame = json.loads(self._buffer[LENGTHS.size : begin]), bytes(self._buffer[begin:end])
        del self._buffer[:end]
        return frame

    def _deliver(self, frame: Frame) -> None:
        exchange = self._open.get(frame[0].get("id", 0))
        if exchange is not None:
            exchange.frames.put(frame)


def _pieces() -> tuple[bytes, bytes, bytes]:
    """What makes the program run, and that: as byte code, and for another Python than ours as source."""
    return source("remote.shipped").encode(), _PROGRAM.packed(CODE), _PROGRAM.packed()


def _command(python: str | None, silence_s: float) -> str:
    """What the login shell is told: it may be any shell, so there is no newline and no exclamation mark in it."""
    first, second, third = (len(piece) for piece in _pieces())
    lines = (
        "import os, sys",
        'if sys.version_info < (3, 9): sys.exit(sys.executable + " is too old: Python " + sys.version.split()[0])',
        'd = b""',
        f"while len(d) < {first + second + third}:",
        f"  p = os.read(0, {first + second + third} - len(d))",
        '  if p == b"": sys.exit(1)',
        "  d += p",
        f"exec(d[:{first}])",
        f'run(d[{first}:{first + second}] if CODE == "{CODE}" else d[{first + second}:], sys.argv[1:3])',
    )
    read = 'exec("' + r"\n".join(line.replace('"', r"\"") for line in lines) + '")'
    choose = (
        'p=$1; case "$p" in "~/"*) p="$HOME/${p#??}";; esac; command -v "$p" >/dev/null 2>&1 || p=python3; '
        'exec "$p" -I -S -c "$2" "$3" "$p" "$4"'
    )
    words = ("exec", "/bin/sh", "-c", choose, "orc", python or "python3", read, f"{silence_s:g}", " " * _ROOM)
    return shlex.join(words)
