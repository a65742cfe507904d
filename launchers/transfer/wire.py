"""Wire protocol of a transfer, over standard input and output of the program on the host.

    client  {"root", "trusted", "dry_run", "manifests"}       one line of JSON
    host    MAGIC, {"new", "missing", "size"}
    client  a stream of the missing contents, gzipped where that pays; end of file
    host    {"missing"}                                       what did not arrive as it should be: nothing, mostly

A stream of contents has a first line, then for each content a line ``<sha256> <size>`` and its bytes, then a last line.
One that was cut off lacks that, so nothing of it counts. Files travel to a service in the same.

The host may print ``{"busy": true}`` at any time, and ``{"error": {"what", "where", "hint"}}`` as its last line.

Travels to the hosts as it is: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import base64
import errno
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from orc.launchers.agent.messages import decode_message
from orc.launchers.snapshot.manifest import Entry
from orc.launchers.snapshot.tree_store import read_chunks

MAGIC = b"\0orc-sync-2\n"  # a login shell may print a greeting before it
GREETING_BYTES = 1 << 16
MAX_LINE = 1 << 28  # bytes: half a million files in a manifest
CHUNK = 1 << 18
FIRST, LAST = b"orc-contents 1\n", b"end\n"
_HEAD = re.compile(rb"([0-9a-f]{64}) ([0-9]{1,19})\n")
_LONGEST_HEAD = 64 + 1 + 19 + 1
_CUT_OFF = "the stream of contents was cut off"


class WireError(Exception):
    """The other end went away, or sent something that is not of this protocol."""


class ByteSource(io.RawIOBase):
    """Binary file over a function that returns at most so many bytes, and none at the end."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def readable(self) -> bool:
        """See `io.IOBase.readable`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase.readinto`."""
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def read_message(file: IO[bytes]) -> dict[str, Any]:
    """Return the next message of *file*. Raises `WireError`."""
    line = file.readline(MAX_LINE)
    if not line.endswith(b"\n"):
        raise WireError("the other end went away" if len(line) < MAX_LINE else "not a message")
    try:
        return decode_message(line)
    except ValueError:
        raise WireError("not a message") from None


def skip_greeting(file: IO[bytes]) -> None:
    """Skip the output of a login shell up to `MAGIC`. Raises `WireError` when the program does not start."""
    skipped = 0
    while skipped <= GREETING_BYTES:
        line = file.readline(GREETING_BYTES)
        skipped += len(line)
        if line.endswith(MAGIC):
            return
        if not line:
            break
    raise WireError("the other end did not start")


def pack_manifests(manifests: list[dict[str, Any]]) -> str:
    """Return manifests compressed, as text for a message."""
    return base64.b64encode(zlib.compress(json.dumps(manifests, separators=(",", ":")).encode(), 1)).decode()


def unpack_manifests(text: str) -> list[dict[str, Any]]:
    """Invert `pack_manifests`. Raises `WireError`."""
    try:
        return list(json.loads(zlib.decompress(base64.b64decode(text))))
    except (ValueError, zlib.error) as error:
        raise WireError(f"damaged on the way: {error}") from None


class Content(NamedTuple):
    """File whose content is to be sent."""

    sha256: str
    size: int
    path: bytes


def is_compressible(contents: Iterable[Content]) -> bool:
    """Return whether compressing pays, judged by the beginnings of the largest files.

    Deflating takes 100 MB/s of a core, encrypting 300: unless it saves a third, a fast line is slowed down by it.
    """
    largest = sorted(contents, key=lambda content: -content.size)[:16]
    sample = b"".join(next(read_chunks(content.path), b"")[: 1 << 14] for content in largest)
    return len(zlib.compress(sample, 1)) < len(sample) * 2 / 3


def head_of(content: Content | Entry) -> bytes:
    """Return the line before a content in a stream."""
    return f"{content.sha256} {content.size}\n".encode()


def stream_of(contents: Iterable[Content]) -> Iterator[bytes]:
    """Yield a stream of *contents*, in pieces that are worth sending.

    Raises `OSError` for a file that cannot be read, or is not as large as it should be.
    """
    held, size = [FIRST], len(FIRST)
    for content in contents:
        left = content.size
        for piece in itertools.chain([head_of(content)], read_chunks(content.path)):
            held.append(piece)
            size += len(piece)
            if size >= CHUNK:
                yield b"".join(held)
                held, size = [], 0
            left -= len(piece)
        if left != -len(head_of(content)):
            raise OSError(errno.EIO, "a stored content was changed", os.fsdecode(content.path))
    yield b"".join([*held, LAST])


def send_contents(
    contents: Iterable[Content], write: Callable[[bytes], object], *, compress: bool, sent: Callable[[int], object]
) -> None:
    """Write a stream of *contents*, gzipped with *compress*; *sent* gets numbers of uncompressed bytes.

    Raises what `stream_of` and *write* raise.
    """
    deflater = zlib.compressobj(1, wbits=31) if compress else None
    for data in stream_of(contents):
        if packed := deflater.compress(data) if deflater else data:
            write(packed)
        sent(len(data))
    if deflater:
        write(deflater.flush())


def receive_contents(
    file: io.BufferedReader, *, maybe_gzipped: bool = True
) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """Yield hash, size and chunks of each content of the stream in *file*. Raises `WireError`.

    Nothing in a stream is a name, but for hashes. What is not *maybe_gzipped* is no larger than *file*.
    """
    gzipped = maybe_gzipped and file.peek(1)[:1] == b"\x1f"
    source: io.BufferedIOBase = gzip.GzipFile(fileobj=file) if gzipped else file
    if _read(source.readline, len(FIRST)) != FIRST:
        raise WireError("not a stream of contents of this version of orc")
    while (line := _read(source.readline, _LONGEST_HEAD)) != LAST:
        head = _HEAD.fullmatch(line)
        if head is None:
            cut = len(line) < _LONGEST_HEAD and not line.endswith(b"\n")
            raise WireError(_CUT_OFF if cut else "not a stream of contents: a line of it is malformed")
        chunks = _chunks(source, int(head[2]))
        yield head[1].decode(), int(head[2]), chunks
        for _ in chunks:  # what was not taken
            pass
    if _read(source.read, 1):
        raise WireError("the stream of contents goes on after its end")


def _chunks(source: io.BufferedIOBase, left: int) -> Iterator[bytes]:
    while left:
        chunk = _read(source.read, min(left, CHUNK))
        if not chunk:
            raise WireError(_CUT_OFF)
        left -= len(chunk)
        yield chunk


def _read(read: Callable[[int], bytes], size: int) -> bytes:
    try:
        return read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise WireError(f"damaged on the way: {error}") from None
