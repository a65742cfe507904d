"""How the two ends of a sync talk: framed messages with a JSON head, and contents as one tar stream inside of them.

Travels to the hosts as it is: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import io
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from orc.launchers.snapshot.manifest import SHA256
from orc.launchers.snapshot.tree_store import read_chunks

# Printed by the program when it is there. A login shell may print a greeting before it.
MAGIC = b"\0orc-sync-1\n"
_GREETING = 1 << 16  # bytes that a greeting may have
_HEAD = struct.Struct(">II")
_MOST = 1 << 28  # bytes of one message: half a million files in a manifest
PIECE = 1 << 18  # bytes of the stream in one message
_BLOCK = 512  # of tar


class WireError(Exception):
    """The other end went away or said something that makes no sense."""


class Message(NamedTuple):
    """One message."""

    head: dict[str, Any]
    body: bytes

    @property
    def op(self) -> str:
        """What it is about."""
        return str(self.head.get("op", ""))


class Channel:
    """Messages over two functions: *read* gives at most so many bytes and none at the end, *write* takes all.

    With a *preface*, an empty one even, that goes out together with the first message, and `MAGIC` comes before the
    first one to be received. Several threads may send. One may receive.
    """

    def __init__(
        self, read: Callable[[int], bytes], write: Callable[[bytes], object], *, preface: bytes | None = None
    ) -> None:
        self._read, self._write = read, write
        self._preface = preface or b""
        self._greeted = preface is None
        self._pending = b""
        self._sending = threading.Lock()
        self.sent = 0  # bytes

    def send(self, op: str, body: bytes = b"", **head: Any) -> None:
        """Send one message. Raises what *write* raises."""
        text = json.dumps({"op": op, **head}, separators=(",", ":")).encode()
        packed = b"".join((_HEAD.pack(len(text), len(body)), text, body))
        with self._sending:
            packed, self._preface = self._preface + packed, b""
            self.sent += len(packed)
            self._write(packed)

    def receive(self) -> Message:
        """The next message. Raises `WireError`, and what *read* raises."""
        if not self._greeted:
            self._skip_greeting()
            self._greeted = True
        size, more = _HEAD.unpack(self._exactly(_HEAD.size))
        if size > _MOST or more > _MOST:
            raise WireError("not a message")
        try:
            head = json.loads(self._exactly(size))
        except ValueError:
            raise WireError("not a message") from None
        if not isinstance(head, dict):
            raise WireError("not a message")
        return Message(head, self._exactly(more))

    def _skip_greeting(self) -> None:
        """Skip what a login shell printed. Raises `WireError` when the program does not come."""
        while MAGIC not in self._pending:
            if len(self._pending) > _GREETING or not (piece := self._read(PIECE)):
                raise WireError("the other end did not start")
            self._pending += piece
        self._pending = self._pending.partition(MAGIC)[2]

    def _exactly(self, size: int) -> bytes:
        pieces, got = [self._pending], len(self._pending)
        while got < size:
            piece = self._read(max(size - got, 1 << 16))
            if not piece:
                raise WireError("the other end went away")
            pieces.append(piece)
            got += len(piece)
        data = b"".join(pieces)
        self._pending = data[size:]
        return data[:size]


class Content(NamedTuple):
    """A content that is to be sent."""

    sha256: str
    size: int
    path: bytes  # where it can be read
    later: bytes = b""  # where it is when it has been moved meanwhile


def deflate(data: bytes) -> bytes:
    """Compressed, quickly."""
    return zlib.compress(data, 1)


def inflate(data: bytes) -> bytes:
    """Inverse of `deflate`, of limited size. Raises `WireError`."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, _MOST)
    except zlib.error as error:
        raise WireError(f"damaged on the way: {error}") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise WireError("damaged on the way")
    return found


def compressible(contents: Iterable[Content]) -> bool:
    """Whether compressing pays: judged by the beginnings of the largest files.

    Deflating takes 100 MB/s of a core, encrypting 300: unless it saves a third, a fast line is slowed down by it.
    """
    largest = sorted(contents, key=lambda content: -content.size)[:16]
    sample = b"".join(next(read_chunks(content.path), b"")[: 1 << 14] for content in largest)
    return len(deflate(sample)) < len(sample) * 2 / 3


def pack(contents: Iterable[Content]) -> Iterator[bytes]:
    """A tar archive of *contents*, each under its hash, in pieces. Raises `OSError`, `WireError` for a file that is
    not as long as it was."""
    import tarfile  # here and below, because most syncs have nothing to send

    waiting = bytearray()
    for content in contents:
        info = tarfile.TarInfo(content.sha256)
        info.size = content.size
        waiting += info.tobuf(tarfile.GNU_FORMAT)
        left = content.size
        for chunk in _read(content):
            left -= len(chunk)
            waiting += chunk
            if len(waiting) >= PIECE:
                yield bytes(waiting)
                waiting.clear()
        if left:
            raise WireError(f"{os.fsdecode(content.path)} is not {content.size} bytes long any more")
        waiting += bytes(-content.size % _BLOCK)
    yield bytes(waiting + bytes(2 * _BLOCK))


def _read(content: Content) -> Iterator[bytes]:
    try:
        yield from read_chunks(content.path)
    except FileNotFoundError:  # before the first chunk: open files do not vanish
        if not content.later:
            raise
        yield from read_chunks(content.later)


def send_contents(channel: Channel, contents: Iterable[Content], compress: bool, sent: Callable[[int], None]) -> None:
    """Send *contents* as ``data`` messages and an ``end``; *sent* hears of uncompressed bytes."""
    deflater = zlib.compressobj(1) if compress else None
    for piece in pack(contents):
        body = deflater.compress(piece) if deflater else piece
        if body:
            channel.send("data", body)
        sent(len(piece))
    if deflater:
        channel.send("data", deflater.flush())
    channel.send("end")


class _Stream(io.RawIOBase):
    """The archive that comes in ``data`` messages, as a file."""

    def __init__(self, channel: Channel, compressed: bool) -> None:
        self._channel = channel
        self._inflater = zlib.decompressobj() if compressed else None
        self._piece = memoryview(b"")
        self.ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece and not self.ended:
            message = self._channel.receive()
            if message.op == "end":
                self.ended = True
            elif message.op == "data":
                # A piece of PIECE bytes inflates to 1000 times as much at most.
                self._piece = memoryview(self._inflated(message.body))
            elif message.op != "wait":
                raise WireError(f"{message.op!r} in the middle of a stream")
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size

    def _inflated(self, data: bytes) -> bytes:
        if self._inflater is None:
            return data
        try:
            return self._inflater.decompress(data)
        except zlib.error as error:
            raise WireError(f"damaged on the way: {error}") from None


def receive_contents(channel: Channel, compressed: bool) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """Hash, size and bytes of what the other end sends, one after the other; raises `WireError`.

    Nothing but plain files named by a hash is let through, and names never become more than names of contents.
    """
    import tarfile

    stream = _Stream(channel, compressed)
    try:
        with tarfile.open(fileobj=io.BufferedReader(stream, PIECE), mode="r|") as archive:
            for member in archive:
                if not member.isreg() or member.issparse() or not SHA256.fullmatch(member.name):
                    raise WireError(f"{member.name!r} is not a content")
                file = archive.extractfile(member)
                if file is None:
                    raise WireError(f"{member.name!r} is not a content")
                yield member.name, member.size, _chunks(file)
        while not stream.ended:  # padding
            stream.readinto(bytearray(PIECE))
    except tarfile.TarError as error:
        raise WireError(f"damaged on the way: {error}") from None


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    import tarfile

    try:
        while chunk := file.read(PIECE):
            yield chunk
    except tarfile.TarError as error:
        raise WireError(f"damaged on the way: {error}") from None
