"""Programs that run in copies of an interpreter which is up already: a new one takes 10 to 40 ms of a processor.

The hand has threads, and a process with threads must not go on in a copy of it. So, before it starts any, it makes a
copy of itself that never has one, and asks that for more. A copy is like a new ``python -I -S``: a session of its own,
no descriptor but the three that it is given, signals as they were. Sent along with `remote_hand`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from array import array

from orc.launchers.remote.files import kill_group
from orc.launchers.remote.shipped import run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Frame = tuple[dict[str, Any], bytes, list[int]]

_LENGTHS = struct.Struct(">II")
_INTS = array("i").itemsize


class Line:
    """Frames with descriptors between the two: a JSON object, and bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, header: Mapping[str, Any], payload: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Raises `OSError` when the other one is gone."""
        text = json.dumps(header).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        with self._sending:
            self._socket.sendmsg([_LENGTHS.pack(len(text), len(payload))], ancillary, socket.MSG_NOSIGNAL)
            self._socket.sendall(text + payload, socket.MSG_NOSIGNAL)

    def receive(self) -> Frame | None:
        """The next frame, with descriptors that are closed on exec; `None` when the other one is gone."""
        try:
            start, ancillary, _, _ = self._socket.recvmsg(_LENGTHS.size, socket.CMSG_SPACE(3 * _INTS))
            descriptors = array("i")
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(data[: len(data) - len(data) % _INTS])
            if not start:
                return None
            header, payload = _LENGTHS.unpack(start + self._exactly(_LENGTHS.size - len(start)))
            return json.loads(self._exactly(header)), self._exactly(payload), list(descriptors)
        except (OSError, EOFError):
            return None

    def close(self) -> None:
        """The other one sees the end."""
        self._socket.close()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._socket.recv(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


# --- the hand's side -------------------------------------------------------------------------------------------------


class Forker:
    """The copy without threads, made now."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                ours.close()
                Source(Line(theirs)).serve()
            finally:
                os._exit(0)
        theirs.close()
        self._line = Line(ours)
        self._copies: dict[int, Copy] = {}

    def listen(self) -> None:
        """Pass on what it says, until it is gone, which it never is before the hand."""
        while (frame := self._line.receive()) is not None:
            said = frame[0]
            self._copies[said["id"]].take(said)

    def bring(self, name: str, packed: bytes) -> None:
        """A program that can be asked for from now on."""
        self._line.send({"do": "keep", "name": name}, packed)

    def start(self, request: Mapping[str, Any]) -> Copy:
        """A copy that becomes a program. Raises `OSError`."""
        copy = self._copies[request["id"]] = Copy(self, request["id"], bool(request["input"]))
        try:
            fields = {name: request[name] for name in ("id", "program", "argv", "env", "drop", "keep")}
            self._line.send({"do": "start", **fields}, descriptors=copy.theirs)
            copy.await_start()
        except BaseException:
            self._copies.pop(request["id"], None)
            copy.close()
            raise
        finally:
            for descriptor in copy.theirs:
                os.close(descriptor)
        return copy

    def watch(self, number: int, pid: int) -> None:
        """A program that the hand has started itself, to be ended when that is killed. Raises `OSError`."""
        self._line.send({"do": "watch", "id": number, "pid": pid})

    def forget(self, number: int) -> None:
        """It has ended. Raises `OSError`."""
        self._line.send({"do": "forget", "id": number})

    def reap(self, number: int) -> None:
        """Its number may be somebody else's from now on."""
        self._copies.pop(number, None)
        self._line.send({"do": "reap", "id": number})


class Copy:
    """One copy, as `subprocess.Popen` would have it: ``pid`` and pipes."""

    def __init__(self, forker: Forker, number: int, has_input: bool) -> None:
        self._forker = forker
        self._number = number
        self._changed = threading.Condition()
        self._said: dict[str, Any] = {}
        self.pid = 0
        read = write = -1
        if has_input:
            read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb", 0) if has_input else None
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        self.stdout, self.stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
        self.theirs = [read if has_input else os.open(os.devnull, os.O_RDONLY), their_out, their_err]

    def take(self, said: Mapping[str, Any]) -> None:
        """What the source says about it."""
        with self._changed:
            self._said.update(said)
            self._changed.notify_all()

    def await_start(self) -> None:
        """Raises `OSError` when there is no room for another process."""
        with self._changed:
            self._changed.wait_for(lambda: "pid" in self._said or "error" in self._said)
        if "error" in self._said:
            raise OSError(self._said["errno"], self._said["error"])
        self.pid = self._said["pid"]

    def await_end(self) -> None:
        """Until it has ended. It is still there, as a zombie."""
        with self._changed:
            self._changed.wait_for(lambda: "status" in self._said)

    def wait(self) -> int:
        """Let go of what has ended; its status, negative for a signal."""
        self._forker.reap(self._number)
        status: int = self._said["status"]
        return status

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


# --- the copy without threads ----------------------------------------------------------------------------------------


class Source:
    """Forks, and says what becomes of the copies. When the hand is gone, it ends them and itself."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._programs: dict[str, bytes] = {}
        self._copies: dict[int, int] = {}  # id -> pid, until it may be reaped
        self._ended: set[int] = set()
        self._watched: dict[int, int] = {}  # id -> pid, of the hand's own children
        leave_open(line.fileno())
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        os.close(nothing)
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until the hand is gone."""
        ready = select.poll()
        ready.register(self._line, select.POLLIN)
        ready.register(self._woken, select.POLLIN)
        while True:
            for descriptor, _ in ready.poll():
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                    self._look()
                elif (frame := self._line.receive()) is None:
                    self._end()
                    return
                else:
                    self._take(*frame)

    def _take(self, said: dict[str, Any], payload: bytes, descriptors: list[int]) -> None:
        if said["do"] == "keep":
            self._programs[said["name"]] = payload
        elif said["do"] == "start":
            self._start(said, descriptors)
        elif said["do"] == "watch":
            self._watched[said["id"]] = said["pid"]
        elif said["do"] == "forget":
            self._watched.pop(said["id"], None)
        elif said["id"] in self._copies:
            os.waitpid(self._copies.pop(said["id"]), 0)
            self._ended.discard(said["id"])

    def _start(self, asked: dict[str, Any], descriptors: list[int]) -> None:
        answer: dict[str, Any] = {"id": asked["id"]}
        try:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    status = self._become(asked, descriptors)
                finally:
                    os._exit(status)
            self._copies[asked["id"]] = answer["pid"] = pid
        except OSError as error:
            answer.update(errno=error.errno, error=error.strerror)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._line.send(answer)

    def _become(self, asked: dict[str, Any], descriptors: list[int]) -> int:
        """The program that was asked for; its exit status, as the interpreter would give it."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._line.close()
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
        leave_open()
        drop = tuple(asked["drop"])
        for name in [name for name in os.environ if name.startswith(drop) and name not in asked["keep"]]:
            del os.environ[name]
        os.environ.update(asked["env"])
        try:
            run(self._programs[asked["program"]], asked["argv"])
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if end.code is not None and not isinstance(end.code, int):
                sys.stderr.write(f"{end.code}\n")
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            status = status or 120  # as the interpreter does
        return status & 0xFF

    def _look(self) -> None:
        """Which have ended? They stay zombies, whose numbers nobody else has, until the hand has heard of it."""
        for number, pid in self._copies.items():
            if number in self._ended:
                continue
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._ended.add(number)
                killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self._line.send({"id": number, "status": -ended.si_status if killed else ended.si_status})

    def _end(self) -> None:
        for pid in (*self._copies.values(), *self._watched.values()):
            kill_group(pid)


def leave_open(*descriptors: int) -> None:
    """Close all but standard input, output and error, and *descriptors*."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in descriptors:
            try:
                os.close(int(name))
            except OSError:
                continue  # that of the listing itself
