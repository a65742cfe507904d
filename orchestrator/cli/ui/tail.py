"""Copying logs: which of them, in which form, and from where on; as they grow, over retries, to the end of their job.

The bytes of a single log are copied as they are, except to a terminal, which would act on some of them.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from orc.launchers.backends.base import LogChunk, LogSelector
from orc.launchers.control_characters import escape_controls
from orc.launchers.errors import BackendUnreachable
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.output import echo_json_line
from orc.orchestrator.ledger.records import JobSize

if TYPE_CHECKING:
    from orc.orchestrator.cli.ui.display import Display
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.views import JobView

_SENDFILE_BYTES = 1 << 30
_LONGEST = 1 << 20  # bytes of a line that is waited for
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)  # of ranks: numbers of ANSI, the most different first


class TerminalWriter:
    """Bytes of a log with their control characters escaped; a carriage return stays, progress bars live on it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: bytes) -> None:
        """Write *data* escaped; a character that is cut at its end comes with the next call."""
        self._stream.write(escape_controls(self._decoder.decode(data), keep="\r").encode())

    def flush(self) -> None:
        """Show what was written."""
        self._stream.flush()


def writer(stream: BinaryIO, *, raw: bool = False) -> TerminalWriter | BinaryIO:
    """Return the writer of logs to *stream*: escaped where it is a terminal, unless *raw*; byte for byte elsewhere."""
    return TerminalWriter(stream) if stream.isatty() and not raw else stream


class Sink:
    """Destination of pieces of logs: a stream, standard output unless it is given."""

    def __init__(self, stream: BinaryIO | None = None, *, raw: bool = False) -> None:
        self._file = stream or sys.stdout.buffer
        self._stream = writer(self._file, raw=raw)

    def write(self, attempt: int, chunk: LogChunk) -> None:
        """Write one piece; pieces of one log come in order."""
        raise NotImplementedError

    def flush(self) -> None:
        """Show what was written."""
        self._stream.flush()

    def finish(self) -> None:
        """Show everything: nothing comes any more."""
        self.flush()


class PlainSink(Sink):
    """A single log without anything added."""

    def __init__(self, stream: BinaryIO | None = None, *, raw: bool = False) -> None:
        super().__init__(stream, raw=raw)
        # A pipe that takes a whole chunk spares a change of process per 64 KiB; anything else refuses, which is fine.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._file.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)

    def write(self, attempt: int, chunk: LogChunk) -> None:
        """Copy the bytes."""
        self._stream.write(chunk.data)

    def copy_file(self, path: str, offset: int) -> int:
        """Copy a file from *offset* on inside the kernel; return the bytes copied, 0 where that cannot be done."""
        if self._file.isatty():
            return 0
        self._file.flush()
        position = offset
        try:
            with open(path, "rb", buffering=0) as log:  # noqa: PTH123
                while count := os.sendfile(self._file.fileno(), log.fileno(), position, _SENDFILE_BYTES):
                    position += count
        except OverflowError:  # an offset beyond the end of any file
            return 0
        except OSError as error:  # no such log yet; a file that is appended to (`>>`) takes nothing from sendfile
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.EAGAIN):
                raise
        return position - offset


class PrefixSink(Sink):
    """Whole lines of several logs, each with its origin: ``[rank 1] ...``."""

    def __init__(self, stream: BinaryIO | None = None, *, raw: bool = False, colours: bool = False) -> None:
        """With *colours*, each origin has one of its own."""
        super().__init__(stream, raw=raw)
        self._colours = colours
        self._rest: dict[tuple[int, LogSelector], bytes] = {}

    def write(self, attempt: int, chunk: LogChunk) -> None:
        """Copy the whole lines, keep the rest until it is complete."""
        key = (attempt, chunk.selector)
        head, newline, rest = chunk.data.rpartition(b"\n")
        lines = self._rest.pop(key, b"") + head if newline else b""
        if newline:
            self._show(chunk.selector, lines)
        else:
            rest = self._rest.pop(key, b"") + rest
        if len(rest) > _LONGEST:  # of a program that ends no line: memory stays flat
            self._show(chunk.selector, rest)
        elif rest:
            self._rest[key] = rest

    def _show(self, selector: LogSelector, lines: bytes) -> None:
        prefix = label(selector).encode()
        if not self._colours:
            self._stream.write(prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")
            return
        number = selector.rank if selector.rank is not None else selector.node or 0
        coloured = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[number % len(_COLOURS)], prefix)
        for line in lines.split(b"\n"):
            self._file.write(coloured)  # past the writer, which escapes what logs bring along
            self._stream.write(line + b"\n")

    def finish(self) -> None:
        """Show unfinished lines, too."""
        for (_, selector), rest in self._rest.items():
            self._show(selector, rest)
        self._rest.clear()
        self.flush()


class JsonSink(Sink):
    """A JSON object per piece and line of output."""

    def write(self, attempt: int, chunk: LogChunk) -> None:
        """``{"attempt", "rank", "node", "offset", "end", "text"}``; bytes that are not UTF-8 become U+FFFD."""
        of = {"attempt": attempt, "rank": chunk.selector.rank, "node": chunk.selector.node}
        text = chunk.data.decode("utf-8", "replace")
        echo_json_line({**of, "offset": chunk.offset, "end": chunk.end, "text": text})


def label(selector: LogSelector) -> str:
    """``[rank 1] ``, ``[node 0] `` or ``[launcher] ``."""
    if selector.launcher:
        return "[launcher] "
    return f"[rank {selector.rank}] " if selector.rank is not None else f"[node {selector.node}] "


@dataclass(frozen=True)
class Selection:
    """Selection of logs: those requested, else all ranks. Pure."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    asked: bool = True  # False when nobody asked for these ranks in particular
    launcher: bool = False

    def of(self, existing: Sequence[LogSelector], *, final: bool) -> list[LogSelector]:
        """Return the chosen ones of the *existing* logs.

        With *final* nothing will be added: where no rank has started, the nodes' logs and the launcher's say why and
        stand in.
        """
        everything = not (self.ranks or self.nodes or self.launcher)
        ranks = [s for s in existing if s.rank is not None and (everything or s.rank in self.ranks)]
        others = [s for s in existing if s.node in self.nodes or (s.launcher and self.launcher)]
        instead = final and (everything or not self.asked)
        return ranks + others or ([s for s in existing if s.rank is None] if instead else [])

    def is_whole(self, existing: Sequence[LogSelector]) -> bool:
        """Return True where certain logs were asked for, and all of them are among the *existing* ones."""
        asked = {("rank", rank) for rank in self.ranks} | {("node", node) for node in self.nodes}
        asked |= {("launcher", True)} if self.launcher else set()
        there = {(kind, getattr(log, kind)) for log in existing for kind in ("rank", "node", "launcher")}
        return bool(asked) and asked <= there

    def single(self, spec: Mapping[str, Any]) -> bool:
        """Return True where it comes down to one log for a job of this specification."""
        if self.ranks or self.nodes or self.launcher:
            return len(set(self.ranks)) + len(set(self.nodes)) + self.launcher == 1
        return JobSize.of(spec).ranks == 1


class Cursor:
    """Positions up to which the logs of a job have been copied."""

    def __init__(
        self,
        client: JobsClient,
        job_id: str,
        sink: Sink,
        start: int = 0,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """*start* is the offset of the first byte of each log; *around* is entered while something is written."""
        self._client, self._job_id, self._sink, self._start, self._around = client, job_id, sink, start, around
        self._offsets: dict[tuple[int, LogSelector], int] = {}
        self._tails: dict[tuple[int, LogSelector], int] = {}  # lines, of logs whose ends have not been read yet
        self._unreachable: dict[tuple[int, LogSelector], BackendUnreachable] = {}

    @property
    def unreachable(self) -> dict[str, str]:
        """Hosts whose logs could not be read the last time, and why."""
        return {error.where or label(log).strip(): error.what for (_, log), error in self._unreachable.items()}

    def read(self, attempt: int, selector: LogSelector, offset: int) -> Iterator[LogChunk]:
        """Yield what a log holds from *offset* on, as far as its host answers; `unreachable` names the others."""
        self._unreachable.pop((attempt, selector), None)
        try:
            yield from self._client.read_log(self._job_id, selector, attempt=attempt, offset=offset)
        except BackendUnreachable as error:
            self._unreachable[attempt, selector] = error

    def copy(self, attempt: int, selectors: Sequence[LogSelector]) -> int:
        """Copy what the logs hold beyond the last copy; the number of bytes."""
        copied = 0
        for selector in selectors:
            if (lines := self._tails.pop((attempt, selector), None)) is not None:
                self.copy_tail(attempt, [selector], lines)
                continue
            offset = self._offsets.get((attempt, selector), self._start)
            if count := self._copy_in_kernel(attempt, selector, offset):
                copied, offset = copied + count, offset + count
                self._offsets[attempt, selector] = offset
            for chunk in self.read(attempt, selector, offset):
                with self._around():
                    self._sink.write(attempt, chunk)
                    self._sink.flush()
                copied += len(chunk.data)
                self._offsets[attempt, selector] = chunk.end
        return copied

    def _copy_in_kernel(self, attempt: int, selector: LogSelector, offset: int) -> int:
        if not isinstance(self._sink, PlainSink):
            return 0
        path = self._client.log_file(self._job_id, selector, attempt)
        with self._around():
            return self._sink.copy_file(path, offset) if path else 0

    def copy_tail(self, attempt: int, selectors: Sequence[LogSelector], lines: int) -> None:
        """Copy the last *lines* lines of each log, and go on from its end; `copy` does so for those not read to it."""
        for selector in selectors:
            last = LogChunk(selector, self._start, b"")
            for chunk in self.read(attempt, selector, self._start):
                data = last.data + chunk.data
                keep = last_lines(data, lines)
                last = LogChunk(selector, chunk.end - len(keep), keep)
            if (attempt, selector) in self._unreachable:
                self._tails[attempt, selector] = lines
                continue
            if last.data:
                with self._around():
                    self._sink.write(attempt, last)
                    self._sink.flush()
            self._offsets[attempt, selector] = last.end


def last_lines(data: bytes, count: int) -> bytes:
    """Return the last *count* lines of *data*, an unfinished one included. Pure."""
    position = len(data) - data.endswith(b"\n")
    for _ in range(count):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            return data
    return data[position + 1 :] if count else b""


# A pass may take at most this share of the time: fast where asking is cheap (this machine), polite where it is not.
REFRESH_SHARE = 0.1
REFRESH_INTERVAL_S = (0.2, 10.0)


class Watch:
    """Refresh of a job now and then, with one warning when its cluster does not answer."""

    def __init__(self, client: JobsClient, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._due, self._silent = 0.0, False

    def poll(self) -> JobView:
        """Return the job, refreshed when that is due."""
        began = time.monotonic()
        if began >= self._due:
            unreachable = self._client.refresh([self._job_id]).unreachable
            if unreachable and not self._silent:
                output.warn_unreachable(unreachable, "the job goes on; still trying")
            self._silent = bool(unreachable)
            low, high = REFRESH_INTERVAL_S
            ended = time.monotonic()
            self._due = ended + min(high, max(low, (ended - began) / REFRESH_SHARE))
        return self._client.job(self._job_id)


def follow(
    client: JobsClient,
    job_id: str,
    cursor: Cursor,
    selection: Selection,
    shown: Display,
    *,
    first_attempt: int = 0,
    only: bool = False,
) -> JobView:
    """Copy logs until the job has ended, or *first_attempt* has if it is the *only* one; returns the last view.

    Without *first_attempt* it begins with the newest.
    """
    watch = Watch(client, job_id)
    current = first_attempt
    while True:
        view = watch.poll()
        newest = len(view.attempts)
        current = current or newest
        moved = False
        # An attempt whose end was seen before its logs were read has been copied completely.
        while 0 < current <= newest:
            final = view.ended or view.attempts[current - 1].ended_at is not None
            moved |= _copy(client, job_id, cursor, current, selection, final=final)
            if current == newest or only:
                break
            shown.note(_boundary(view, current))
            current += 1
        if view.ended or (only and newest >= current and view.attempts[current - 1].ended_at is not None):
            return view
        _show(view, shown)
        if not moved:
            time.sleep(client.log_interval_s)


def _copy(client: JobsClient, job_id: str, cursor: Cursor, attempt: int, selection: Selection, *, final: bool) -> bool:
    try:
        selectors = selection.of(client.log_selectors(job_id, attempt=attempt), final=final)
        return cursor.copy(attempt, selectors) > 0
    except BackendUnreachable:
        return False  # `Watch.poll` has printed it


def _boundary(view: JobView, number: int) -> str:
    """Return the line between the output of an attempt that has ended and that of the next one."""
    ended = view.attempts[number - 1]
    why = jobtext.first_line(ended.reason) or ended.cause or ""
    return f"--- attempt {number} {ended.state}{f': {why}' if why else ''}; attempt {number + 1} ---"


def _show(view: JobView, shown: Display) -> None:
    number = f" attempt {len(view.attempts)}" if len(view.attempts) > 1 else ""
    step, situation = f"{view.id} {view.state}{number}", jobtext.situation(view)
    if view.state == "RUNNING":  # what changes all the time is shown where it can be overwritten
        shown.show(step, situation)
    else:
        shown.show(f"{step}: {situation}")


def conclusion(view: JobView) -> str:
    """Print the end of a job, with the first failure when there is one."""
    lines = [jobtext.headline(view)]
    if view.state == "FAILED" and view.attempts and (verdict := view.attempts[-1].exit) and verdict.first_failure:
        lines += jobtext.failure(verdict.first_failure)
    if view.state == "FAILED":
        lines.append(f"more: orc status {view.id}; orc logs {view.id}")
    return "\n".join(lines)
