"""Stream of contents: how files travel to a service. Framing only; nothing is trusted, no name of a file is in it.

A first line, then for each content a line ``<sha256> <size>`` and its bytes, then a last line. A stream that was cut
off lacks that, so nothing of it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import SHA256, Entry
from orc.launchers.snapshot.tree_store import read_chunks

FIRST = b"orc-contents 1\n"
LAST = b"end\n"
_LONGEST_LINE = 64 + 1 + 19 + 1


class Upload(NamedTuple):
    """Contents that travel in one request."""

    entries: tuple[Entry, ...]
    size: int  # bytes of the whole stream


def line(entry: Entry) -> bytes:
    """Return the line before a content."""
    return f"{entry.sha256} {entry.size}\n".encode()


def batches(entries: Iterable[Entry], limit: int) -> Iterator[Upload]:
    """Yield uploads of *limit* bytes at most. Raises `BundleError` for a content that fits in none."""
    frame = len(FIRST) + len(LAST)
    chosen: list[Entry] = []
    size = frame
    for entry in entries:
        cost = len(line(entry)) + entry.size
        if frame + cost > limit:
            raise BundleError(
                f"a file of {entry.size} bytes is more than the service takes in one upload ({limit} bytes)",
                where=entry.path,
                hint="exclude it in .orcignore or workdir.exclude and bring it to the cluster in another way",
            )
        if size + cost > limit:
            yield Upload(tuple(chosen), size)
            chosen, size = [], frame
        chosen.append(entry)
        size += cost
    if chosen:
        yield Upload(tuple(chosen), size)


def encode(upload: Upload, source_of: Callable[[Entry], bytes]) -> Iterator[bytes]:
    """Yield the bytes of a stream; *source_of* gives the path of a content. Raises `BundleError`."""
    yield FIRST
    for entry in upload.entries:
        yield line(entry)
        left = entry.size
        for chunk in read_chunks(source_of(entry)):
            left -= len(chunk)
            if left < 0:
                break
            yield chunk
        if left:
            raise BundleError("a stored content was changed", where=entry.path, hint="submit again")
    yield LAST


class ContentTaker(Protocol):
    """Taker of the contents of a stream."""

    def begin(self, sha256: str, size: int) -> None:
        """Get ready for a content."""
        ...

    def write(self, data: bytes) -> None:
        """Take the next bytes of it."""
        ...

    def end(self) -> None:
        """Check the content, of which all bytes have been taken."""
        ...


class Decoder:
    """Reader of a stream that comes in pieces of any size. Raises `BundleError` for what is no such stream."""

    def __init__(self, taker: ContentTaker) -> None:
        self._taker = taker
        self._held = b""  # the begin of a line
        self._left: int | None = None  # bytes of the current content
        self._begun = self._ended = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        view = memoryview(data)
        while view:
            if self._ended:
                raise BundleError("the stream of contents goes on after its end")
            if self._left is not None:
                piece = view[: self._left]
                self._taker.write(bytes(piece))
                self._left -= len(piece)
                view = view[len(piece) :]
                self._close_if_whole()
                continue
            text = bytes(view[: _LONGEST_LINE + 1])
            head, newline, _ = text.partition(b"\n")
            if len(self._held) + len(head) > _LONGEST_LINE or (not newline and len(text) > _LONGEST_LINE):
                raise BundleError("not a stream of contents: a line of it is too long")
            view = view[len(head) + len(newline) :]
            self._held += head + newline
            if newline:
                whole, self._held = self._held, b""
                self._take_line(whole)

    def finish(self) -> None:
        """Raise `BundleError` unless the stream was whole."""
        if not self._ended:
            raise BundleError("the stream of contents was cut off", hint="submit again")

    def _take_line(self, text: bytes) -> None:
        if not self._begun:
            if text != FIRST:
                raise BundleError("not a stream of contents of this version of orc")
            self._begun = True
            return
        if text == LAST:
            self._ended = True
            return
        sha256, _, size = text.rstrip(b"\n").decode("ascii", "replace").partition(" ")
        if not SHA256.fullmatch(sha256) or not (size.isascii() and size.isdigit()):
            raise BundleError("not a stream of contents: a line of it is malformed")
        self._left = int(size)
        self._taker.begin(sha256, self._left)
        self._close_if_whole()

    def _close_if_whole(self) -> None:
        if self._left == 0:
            self._left = None
            self._taker.end()
