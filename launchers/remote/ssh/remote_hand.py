"""What orc runs on a host: one program per connection that does what it is told over its standard input and output.

Its source and that of what it imports are sent over the channel; nothing is installed or left there. Standard library
alone, Python 3.9.

A frame is two lengths, a JSON object and a payload. Frames with ``op`` are requests, each handled in a thread of its
own; others belong to the request ``id``. While something is underway both sides say something every few seconds, so
each notices that the other is gone; programs that still run then are ended with their process groups.
"""

from __future__ import annotations

import json
import os
import queue
import select
import selectors
import signal
import struct
import sys
import threading
import time

from orc.launchers.remote import files
from orc.launchers.remote.shipped import CODE
from orc.launchers.remote.ssh.remote_fork import Copy, Forker

TYPE_CHECKING = False  # `typing` costs milliseconds on every host
if TYPE_CHECKING:
    import subprocess
    from typing import Any

MAGIC = b"\norc-hand 1\n"
LENGTHS = struct.Struct(">II")
CHUNK = 1 << 16  # bytes of payload per frame; small enough that a frame over a slow line is a sign of life
WINDOW = 2 << 20  # bytes of a program's output, or input, that may be on the way
TICK_S = 2.0
IDLE_S = 300.0  # nobody asked for anything: the connection may be dead without our knowing
LONGEST = 64 << 20


class Gone(Exception):
    """The other side is gone, or says what nobody understands."""


class Hand:
    """Takes requests from one descriptor and answers on another."""

    def __init__(self, source: int, sink: int, forker: Forker, python: str, silence_s: float) -> None:
        self._source = source
        self._forker = forker
        self._python = python
        self._sink = sink
        self._silence_s = silence_s
        self._sending = threading.Lock()
        self._starting = threading.Lock()
        self._open: dict[int, queue.SimpleQueue[tuple[dict[str, Any], bytes]]] = {}
        self._programs: dict[int, Program] = {}
        self._writers: set[files.Writer] = set()
        self._heard = time.monotonic()

    def serve(self) -> None:
        """Until the other side is gone."""
        hello = {
            "python": list(sys.version_info[:3]),
            "home": os.path.expanduser("~"),
            "pid": os.getpid(),
            "interpreter": self._python,
            "code": CODE,
        }
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            with self._sending:
                self._write(MAGIC)
            self.send(hello)
            while True:
                header, payload = self._receive()
                if header.get("op") == "program":
                    self._forker.bring(header["name"], payload)
                elif "op" in header:
                    self._open[header["id"]] = queue.SimpleQueue()
                    threading.Thread(target=self._answer, args=(header, payload), daemon=True).start()
                else:
                    self._more(header, payload)
        except Gone:
            self.end()
        except Exception:
            sys.excepthook(*sys.exc_info())
            self.end()

    def _more(self, header: dict[str, Any], payload: bytes) -> None:
        """More of a request that is underway. It may be answered at this moment: what then still comes is too late."""
        frames = self._open.get(header.get("id", 0))
        if frames is not None:
            frames.put((header, payload))
            program = self._programs.get(header["id"])
            if program is not None:
                program.wake()

    def end(self) -> None:
        """Nobody is there any more: leave nothing running and nothing half-written."""
        self._starting.acquire()  # for good: what is just being started is known before it is ended
        for program in list(self._programs.values()):
            program.kill()
        for writer in list(self._writers):
            try:
                writer.abandon()
            except OSError:
                continue  # it has just been finished
        os._exit(0)

    def forget(self, number: int) -> None:
        """A program has ended: its number may soon be somebody else's."""
        self._forker.forget(number)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """One frame."""
        with self._sending:
            self._write(_frame(header, payload))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._sink, view) :]
        except OSError as error:
            raise Gone from error

    def _receive(self) -> tuple[dict[str, Any], bytes]:
        header, payload = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if header + payload > LONGEST:
            raise Gone
        return json.loads(self._exactly(header)), self._exactly(payload)

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(self._source, min(size, CHUNK))
            except OSError as error:
                raise Gone from error
            if not part:
                raise Gone
            self._heard = time.monotonic()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _listen(self) -> None:
        self._forker.listen()
        self.end()  # somebody has killed it: a new connection has a new one

    def _watch(self) -> None:
        """Say that we are alive while something is underway, and notice that nobody listens."""
        awake = time.monotonic()
        while True:
            began = time.monotonic()
            time.sleep(TICK_S / 2)
            now = time.monotonic()
            if now - began > TICK_S:  # it was we who were stopped, or asleep
                awake = now
            if now - max(self._heard, awake) > (self._silence_s if self._open else IDLE_S):
                self.end()
            if self._open:
                try:
                    self._tick()
                except Gone:
                    self.end()

    def _tick(self) -> None:
        """Say something, unless somebody just does, or nobody takes it: who waits for that cannot watch."""
        if self._sending.acquire(blocking=False):
            try:
                if select.select([], [self._sink], [], 0)[1]:
                    self._write(_frame({"tick": 1}))
            finally:
                self._sending.release()

    def _answer(self, request: dict[str, Any], payload: bytes) -> None:
        number = request["id"]
        try:
            self._reply(number, *self._do(request, payload))
        except OSError as error:
            self._fail(number, error)
        except Gone:
            self.end()
        except Exception as error:
            self._fail(number, OSError(0, f"{type(error).__name__}: {error}"))
        finally:
            self._open.pop(number, None)
            self._programs.pop(number, None)

    def _fail(self, number: int, error: OSError) -> None:
        try:
            self.send({"id": number, "errno": error.errno, "error": error.strerror or str(error)})
        except Gone:
            self.end()

    def _reply(self, number: int, answer: dict[str, Any], payload: bytes = b"") -> None:
        sent = 0
        while len(payload) - sent > CHUNK:
            self.send({"id": number, "more": 1}, payload[sent : sent + CHUNK])
            sent += CHUNK
        self.send({"id": number, "done": answer}, payload[sent:])

    def _do(self, request: dict[str, Any], payload: bytes) -> tuple[Any, ...]:
        what, path = request["op"], request.get("path", "")
        if what == "ping":
            return ({},)
        if what == "start":
            return (self._start(request),)
        if what == "expand":
            return ({"path": os.path.expanduser(path)},)
        if what == "write":
            return (self._write_file(request, payload),)
        if what == "mkdir":
            files.make_directories(path, request["mode"])
            return ({},)
        if what == "remove":
            files.remove(path)
            return ({},)
        if what == "read":
            return {}, files.read_range(path, request["offset"], request["limit"])
        if what == "read_many":
            found = files.read_existing(json.loads(self._whole(request, payload)))
            return {"sizes": {path: len(data) for path, data in found.items()}}, b"".join(found.values())
        if what == "names":
            return ({"names": files.names(path)},)
        raise OSError(0, f"the host was asked for {what!r}, which it does not know")

    def _whole(self, request: dict[str, Any], payload: bytes) -> bytes:
        parts, size = [payload], len(payload)
        while size < request["size"]:
            parts.append(self._open[request["id"]].get()[1])
            size += len(parts[-1])
        return b"".join(parts)

    def _write_file(self, request: dict[str, Any], payload: bytes) -> dict[str, Any]:
        writer = files.Writer(request["path"], request["mode"])
        self._writers.add(writer)
        try:
            written = 0
            while True:
                writer.write(payload)
                written += len(payload)
                if written >= request["size"]:
                    writer.commit()
                    return {}
                payload = self._open[request["id"]].get()[1]
        finally:
            self._writers.discard(writer)

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        number = request["id"]
        if "program" in request:
            program = Program(self, number, self._forker.start(request), self._open[number])
            self._programs[number] = program
        else:
            with self._starting:
                started = _popen(request)
                program = Program(self, number, started, self._open[number])
                self._programs[number] = program
                try:
                    self._forker.watch(number, started.pid)
                except OSError:
                    program.kill()
                    raise
        self.send({"id": number, "started": 1})
        return {"status": program.run()}


class Program:
    """A program that was asked for, with its input and output."""

    def __init__(
        self,
        hand: Hand,
        number: int,
        started: subprocess.Popen[bytes] | Copy,
        said: queue.SimpleQueue[tuple[dict[str, Any], bytes]],
    ) -> None:
        self._hand = hand
        self._number = number
        self._said = said
        self._popen = started
        self._woken, self._waker = os.pipe()
        self._waking = threading.Lock()
        self._reaped = False
        self._reaping = threading.Lock()
        self._ended = False
        self._credit = WINDOW
        self._input = b""
        self._no_more_input = False
        self._pipes = selectors.DefaultSelector()
        self._pipes.register(self._woken, selectors.EVENT_READ)
        self._outputs: dict[int, str] = {}
        self._left: dict[int, int] | None = None
        for pipe, name in ((self._popen.stdout, "out"), (self._popen.stderr, "err")):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._outputs[pipe.fileno()] = name
        if self._popen.stdin is not None:
            os.set_blocking(self._popen.stdin.fileno(), False)

    def wake(self) -> None:
        """A frame has come, or the program has ended."""
        with self._waking:
            if self._waker >= 0:
                os.write(self._waker, b"x")

    def kill(self) -> None:
        """End its process group."""
        with self._reaping:  # its number is not somebody else's yet
            if not self._reaped:
                files.kill_group(self._popen.pid)

    def run(self) -> int:
        """Carry bytes until it has ended; its status, negative for a signal."""
        threading.Thread(target=self._await_end, daemon=True).start()
        self._take_frames()  # those that came before anybody could be woken
        try:
            while not (self._ended and not self._outputs):
                self._carry()
            with self._reaping:
                self._reaped = True
                if not isinstance(self._popen, Copy):
                    self._hand.forget(self._number)
                return self._popen.wait()
        finally:
            self._pipes.close()
            with self._waking:
                os.close(self._woken)
                os.close(self._waker)
                self._waker = -1
            for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
                if pipe is not None:
                    pipe.close()

    def _await_end(self) -> None:
        if isinstance(self._popen, Copy):
            self._popen.await_end()
        else:
            os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)  # not reaped: see kill
        self._ended = True
        self.wake()

    def _carry(self) -> None:
        if self._ended and self._left is None:
            # What it said is in the pipes by now. What comes later is from others who hold them open.
            self._left = {descriptor: files.waiting(descriptor) for descriptor in self._outputs}
        if self._left is not None:
            for descriptor in [d for d in self._outputs if self._left[d] <= 0]:
                self._shut(descriptor)
            if not self._outputs:
                return
        self._watch_pipes()
        ready = {key.fd for key, _ in self._pipes.select()}
        if self._woken in ready:
            os.read(self._woken, 4096)
            self._take_frames()
        for descriptor in list(self._outputs):
            if descriptor in ready and self._credit > 0:
                self._pass_on(descriptor)
        stdin = self._popen.stdin
        if stdin is not None and not stdin.closed and stdin.fileno() in ready:
            self._feed()

    def _watch_pipes(self) -> None:
        wanted = set(self._outputs) if self._credit > 0 else set()
        stdin = self._popen.stdin
        feed = stdin.fileno() if stdin is not None and not stdin.closed and self._input else -1
        for descriptor in {*wanted, feed} - {-1} - set(self._pipes.get_map()):
            self._pipes.register(descriptor, selectors.EVENT_WRITE if descriptor == feed else selectors.EVENT_READ)
        for unwanted in set(self._pipes.get_map()) - wanted - {feed, self._woken}:
            self._pipes.unregister(unwanted)

    def _take_frames(self) -> None:
        while True:
            try:
                header, payload = self._said.get_nowait()
            except queue.Empty:
                break
            self._credit += header.get("ack", 0)
            self._input += payload
            if header.get("kill"):
                self.kill()
            if header.get("eof"):
                self._no_more_input = True
        self._maybe_close_input()

    def _feed(self) -> None:
        assert self._popen.stdin is not None
        try:
            count = os.write(self._popen.stdin.fileno(), self._input[:CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._close_input()
            self._hand.send({"id": self._number, "gone": 1})
            return
        self._input = self._input[count:]
        self._hand.send({"id": self._number, "ack": count})
        self._maybe_close_input()

    def _maybe_close_input(self) -> None:
        if self._no_more_input and not self._input:
            self._close_input()

    def _close_input(self) -> None:
        stdin = self._popen.stdin
        if stdin is not None and not stdin.closed:
            if stdin.fileno() in self._pipes.get_map():
                self._pipes.unregister(stdin.fileno())
            stdin.close()

    def _pass_on(self, descriptor: int) -> None:
        try:
            left = CHUNK if self._left is None else self._left[descriptor]
            data = os.read(descriptor, min(CHUNK, self._credit, left))
        except BlockingIOError:
            return
        if not data:
            self._shut(descriptor)
            return
        self._credit -= len(data)
        if self._left is not None:
            self._left[descriptor] -= len(data)
        self._hand.send({"id": self._number, self._outputs[descriptor]: 1}, data)

    def _shut(self, descriptor: int) -> None:
        name = self._outputs.pop(descriptor)
        if descriptor in self._pipes.get_map():
            self._pipes.unregister(descriptor)
        self._hand.send({"id": self._number, "shut": name})


def _frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


def _popen(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    import subprocess

    drop, keep = tuple(request["drop"]), request["keep"]
    env = {k: v for k, v in os.environ.items() if k in keep or not k.startswith(drop)}
    return subprocess.Popen(
        request["argv"],
        stdin=subprocess.PIPE if request["input"] else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**env, **request["env"]},
        start_new_session=True,
    )


def main() -> None:
    """``SILENCE_S PYTHON``: serve on standard input and output, which nothing else gets to use."""
    forker = Forker()
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    hand = Hand(source, sink, forker, python=sys.argv[2], silence_s=float(sys.argv[1]))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: hand.end())
    hand.serve()
