"""What goes over the line: frames, archives that may hold nothing but contents, compression."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from orc.launchers.transfer.wire import (
    MAGIC,
    Channel,
    Content,
    WireError,
    compressible,
    deflate,
    inflate,
    pack,
    receive_contents,
    send_contents,
)


class Line:
    """What one side writes and the other reads, in pieces of *step* bytes."""

    def __init__(self, data: bytes = b"", step: int = 1 << 20) -> None:
        self.data, self.step = bytearray(data), step

    def write(self, data: bytes) -> None:
        self.data += data

    def read(self, size: int) -> bytes:
        piece = bytes(self.data[: min(size, self.step)])
        del self.data[: len(piece)]
        return piece


def channel(line: Line) -> Channel:
    return Channel(line.read, line.write)


def content(directory: Path, data: bytes) -> Content:
    path = directory / hashlib.sha256(data).hexdigest()
    path.write_bytes(data)
    return Content(path.name, len(data), os.fsencode(path))


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_messages_arrive_as_they_were_sent(step: int) -> None:
    line = Line(step=step)
    channel(line).send("first", b"body", name="größe")
    channel(line).send("second")
    there = channel(line)
    message = there.receive()
    assert (message.op, message.head["name"], message.body) == ("first", "größe", b"body")
    assert there.receive().op == "second"
    with pytest.raises(WireError, match="went away"):
        there.receive()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">II", 1 << 30, 0),
        struct.pack(">II", 2, 1 << 30) + b"{}",
        struct.pack(">II", 3, 0) + b"{]}",
        struct.pack(">II", 2, 0) + b"[]",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="not a message"):
        channel(Line(data)).receive()


def test_the_program_goes_before_the_first_message_and_a_greeting_is_skipped() -> None:
    out = Line()
    answer = Line()
    channel(answer).send("hello")
    back = Line(b"Last login: today\r\n" + MAGIC + bytes(answer.data), step=5)
    here = Channel(back.read, out.write, preface=b"program")
    here.send("ask")
    assert out.data.startswith(b"program\0")
    assert here.sent == len(out.data)
    assert here.receive().op == "hello"


def test_a_greeting_without_end_is_no_program() -> None:
    here = Channel(Line(b"nonsense\n" * 100_000).read, lambda _: None, preface=b"program")
    with pytest.raises(WireError, match="did not start"):
        here.receive()


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 3_000_000])
def test_contents_arrive_as_they_were_sent(tmp_path: Path, compress: bool, size: int) -> None:
    contents = [content(tmp_path, bytes(size)), content(tmp_path, os.urandom(1000))]
    line = Line()
    sent: list[int] = []
    send_contents(channel(line), contents, compress, sent.append)
    there = channel(line)
    found = [(name, length, b"".join(chunks)) for name, length, chunks in receive_contents(there, compress)]
    assert [(name, length) for name, length, _ in found] == [(c.sha256, c.size) for c in contents]
    assert [hashlib.sha256(data).hexdigest() for *_, data in found] == [c.sha256 for c in contents]
    assert line.data == b""  # the end was read as well: the next message can follow
    assert sum(sent) >= size + 1000


def test_a_content_that_is_not_read_to_its_end_is_skipped(tmp_path: Path) -> None:
    contents = [content(tmp_path, os.urandom(100_000)), content(tmp_path, b"second")]
    line = Line()
    send_contents(channel(line), contents, False, lambda _: None)
    names = [name for name, _, _ in receive_contents(channel(line), False)]
    assert names == [c.sha256 for c in contents]


def archive(fill: Callable[[tarfile.TarFile], object]) -> Channel:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        fill(tar)
    line = Line()
    channel(line).send("data", data.getvalue())
    channel(line).send("end")
    return channel(line)


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> Callable[[tarfile.TarFile], object]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return lambda tar: tar.addfile(info, io.BytesIO())


@pytest.mark.parametrize(
    "evil",
    [
        member("../../etc/passwd"),
        member("/etc/passwd"),
        member("a" * 63),
        member("a" * 64 + "/b"),
        member("A" * 64),
        member("a" * 64, tarfile.SYMTYPE, "/etc/passwd"),
        member("a" * 64, tarfile.LNKTYPE, "/etc/passwd"),
        member("a" * 64, tarfile.DIRTYPE),
        member("a" * 64, tarfile.FIFOTYPE),
        member("a" * 64, tarfile.CHRTYPE),
    ],
)
def test_nothing_but_contents_gets_out_of_an_archive(evil: Callable[[tarfile.TarFile], object]) -> None:
    with pytest.raises(WireError, match="is not a content"):
        list(receive_contents(archive(evil), False))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_damaged_stream_is_refused(compressed: bool) -> None:
    line = Line()
    channel(line).send("data", b"neither tar nor zlib" * 100)
    channel(line).send("end")
    with pytest.raises(WireError, match="damaged on the way"):
        list(receive_contents(channel(line), compressed))


def test_a_stream_that_ends_early_is_refused(tmp_path: Path) -> None:
    line = Line()
    pieces = b"".join(pack([content(tmp_path, bytes(100_000))]))
    channel(line).send("data", pieces[:50_000])
    channel(line).send("end")
    with pytest.raises(WireError, match="damaged on the way"):
        [b"".join(chunks) for _, _, chunks in receive_contents(channel(line), False)]


def test_another_message_in_a_stream_is_refused() -> None:
    line = Line()
    channel(line).send("hello")
    with pytest.raises(WireError, match="in the middle of a stream"):
        list(receive_contents(channel(line), False))


@pytest.mark.parametrize("change", [b"", b"longer than it was"])
def test_a_file_that_is_not_as_long_as_it_was_is_not_sent(tmp_path: Path, change: bytes) -> None:
    item = content(tmp_path, b"ten bytes!")
    Path(os.fsdecode(item.path)).write_bytes(change)
    with pytest.raises(WireError, match="is not 10 bytes long any more"):
        list(pack([item]))


def test_only_what_gets_much_smaller_is_compressed(tmp_path: Path) -> None:
    text = content(tmp_path, b"import torch\n" * 1000)
    noise = content(tmp_path, os.urandom(13_000))
    assert compressible([text])
    assert not compressible([noise])
    assert not compressible([text, noise, content(tmp_path, os.urandom(16_000))])
    assert not compressible([])


def test_what_is_inflated_was_deflated() -> None:
    assert inflate(deflate(b"text" * 1000)) == b"text" * 1000
    for damaged in (b"", b"no zlib", deflate(b"text")[:-3]):
        with pytest.raises(WireError, match="damaged on the way"):
            inflate(damaged)
