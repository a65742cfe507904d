"""Wire protocol of a transfer, over standard input and output of the program on the host.

    client  {"root", "trusted", "dry_run", "manifests"}       one line of JSON
    host    MAGIC, {"new", "missing", "size"}
    client  a tar archive of the missing contents, each named by its hash, gzipped where that pays; end of file
    host    {"missing"}                                       what did not arrive as it should be: nothing, mostly

The host may print ``{"busy": true}`` at any time, and ``{"error": {"what", "where", "hint"}}`` as its last line.

Travels to the hosts as it is: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import base64
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from orc.launchers.agent.messages import decode_message
from orc.launchers.snapshot.manifest import SHA256
from orc.launchers.snapshot.tree_store import read_chunks

MAGIC = b"\0orc-sync-2\n"  # a login shell may print a greeting before it
GREETING_BYTES = 1 << 16
MAX_LINE = 1 << 28  # bytes: half a million files in a manifest
CHUNK = 1 << 18


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


class _Sink:
    """Archive file that hands its bytes on, gzipped or not."""

    def __init__(self, write: Callable[[bytes], object], compress: bool, sent: Callable[[int], object]) -> None:
        self._write, self._sent = write, sent
        self._deflater = zlib.compressobj(1, wbits=31) if compress else None

    def write(self, data: bytes) -> int:
        if packed := self._deflater.compress(data) if self._deflater else data:
            self._write(packed)
        self._sent(len(data))
        return len(data)

    def finish(self) -> None:
        if self._deflater:
            self._write(self._deflater.flush())


def send_contents(
    contents: Iterable[Content], write: Callable[[bytes], object], *, compress: bool, sent: Callable[[int], object]
) -> None:
    """Write a tar archive of *contents*; *sent* gets numbers of uncompressed bytes.

    Raises `OSError` for a file that cannot be read or has become shorter, and what *write* raises.
    """
    import tarfile  # here and below, because most transfers have nothing to send

    sink = _Sink(write, compress, sent)
    with tarfile.open(fileobj=sink, mode="w|", bufsize=CHUNK, format=tarfile.GNU_FORMAT) as archive:  # type: ignore[call-overload]
        for content in contents:
            info = tarfile.TarInfo(content.sha256)
            info.size = content.size
            with open(os.open(content.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
                archive.addfile(info, file)
    sink.finish()


def receive_contents(file: IO[bytes]) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """Yield hash, size and chunks of each content of the archive in *file*. Raises `WireError`.

    Nothing but plain files named by a hash is let through, and names never become more than names of contents.
    """
    import tarfile

    try:
        with tarfile.open(fileobj=file, mode="r|*", bufsize=CHUNK) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
                if content is None or not SHA256.fullmatch(member.name):
                    raise WireError(f"{member.name!r} is not a content")
                yield member.name, member.size, _chunks(content)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise WireError(f"damaged on the way: {error}") from None


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    import tarfile

    try:
        while chunk := content.read(CHUNK):
            yield chunk
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise WireError(f"damaged on the way: {error}") from None
