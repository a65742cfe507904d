"""What goes over the line: messages, streams that may hold nothing but contents, compression, and the programs."""

from __future__ import annotations

import ast
import hashlib
import io
import os
from pathlib import Path

import pytest

from orc.launchers.agent.messages import encode_message
from orc.launchers.remote.programs import full_name, source
from orc.launchers.transfer import wire
from orc.launchers.transfer.delivery import PRESENCE, RECEIVER
from orc.launchers.transfer.targets import COLLECTOR
from orc.launchers.transfer.wire import (
    MAGIC,
    ByteSource,
    Content,
    WireError,
    is_compressible,
    pack_manifests,
    read_message,
    receive_contents,
    send_contents,
    skip_greeting,
    unpack_manifests,
)


def line(data: bytes, step: int = 1 << 20) -> io.BufferedReader:
    """What one side reads of *data*, in pieces of *step* bytes."""
    source = io.BytesIO(data)
    return io.BufferedReader(ByteSource(lambda size: source.read(min(size, step))))


def content(directory: Path, data: bytes) -> Content:
    path = directory / hashlib.sha256(data).hexdigest()
    path.write_bytes(data)
    return Content(path.name, len(data), os.fsencode(path))


def stream(contents: list[Content], *, compress: bool = False) -> bytes:
    data = bytearray()
    send_contents(contents, data.extend, compress=compress, sent=lambda _: None)
    return bytes(data)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_messages_arrive_as_they_were_sent(step: int) -> None:
    there = line(encode_message({"name": "größe\n", "size": 1}) + encode_message({}), step)
    assert read_message(there) == {"name": "größe\n", "size": 1}
    assert read_message(there) == {}
    with pytest.raises(WireError, match="went away"):
        read_message(there)


@pytest.mark.parametrize("data", [b"{]}\n", b"[]\n", b"\xff\n"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="not a message"):
        read_message(line(data))


def test_a_message_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_LINE", 1000)
    endless = line(b"x" * 100_000)
    with pytest.raises(WireError, match="not a message"):
        read_message(endless)


def test_a_greeting_is_skipped_even_one_that_ends_without_a_new_line() -> None:
    there = line(b"Last login: today\r\n> " + MAGIC + encode_message({"new": []}), step=5)
    skip_greeting(there)
    assert read_message(there) == {"new": []}


@pytest.mark.parametrize("data", [b"nonsense\n" * 100_000, b"Welcome\n"])
def test_a_greeting_without_a_program_behind_it_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="did not start"):
        skip_greeting(line(data))


def test_manifests_arrive_as_they_were_sent() -> None:
    assert unpack_manifests(pack_manifests([{"entries": ["größe"] * 1000}])) == [{"entries": ["größe"] * 1000}]
    for damaged in ("", "no base64!", pack_manifests([{}])[:-8]):
        with pytest.raises(WireError, match="damaged on the way"):
            unpack_manifests(damaged)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 3_000_000])
def test_contents_arrive_as_they_were_sent(tmp_path: Path, compress: bool, size: int) -> None:
    contents = [content(tmp_path, bytes(size)), content(tmp_path, os.urandom(1000))]
    data, sent = bytearray(), list[int]()
    send_contents(contents, data.extend, compress=compress, sent=sent.append)
    found = [(name, length, b"".join(chunks)) for name, length, chunks in receive_contents(line(bytes(data), 1 << 12))]
    assert [(name, length) for name, length, _ in found] == [(c.sha256, c.size) for c in contents]
    assert [hashlib.sha256(data).hexdigest() for *_, data in found] == [c.sha256 for c in contents]
    assert sum(sent) >= size + 1000
    assert not compress or size < 3_000_000 or len(data) < 100_000


def test_a_content_that_is_not_read_to_its_end_is_skipped(tmp_path: Path) -> None:
    contents = [content(tmp_path, os.urandom(100_000)), content(tmp_path, b"second")]
    names = [name for name, _, _ in receive_contents(line(stream(contents)))]
    assert names == [c.sha256 for c in contents]


GOOD = hashlib.sha256(b"good").hexdigest()


@pytest.mark.parametrize(
    "head",
    [
        *("../../etc/passwd 4", "/etc/passwd 4", f"{GOOD[1:]} 4", f"{GOOD}/b 4", f"{GOOD.upper()} 4", f"{GOOD} -4"),
        *(f"{GOOD}", f"{GOOD} 4 5", "a" * 100_000),
    ],
)
def test_nothing_but_contents_gets_out_of_a_stream(head: str) -> None:
    with pytest.raises(WireError, match="a line of it is malformed"):
        list(receive_contents(line(f"orc-contents 1\n{head}\ngoodend\n".encode())))


@pytest.mark.parametrize("data", [b"neither stream nor gzip" * 100, b"\x1f\x8b\x08nor this" * 100, b""])
def test_what_is_no_stream_of_contents_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match=r"damaged on the way|not a stream of contents"):
        list(receive_contents(line(data)))


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("lacking", [1, 4, 50_000])
def test_a_stream_that_ends_early_is_refused(tmp_path: Path, compress: bool, lacking: int) -> None:
    data = stream([content(tmp_path, os.urandom(100_000))], compress=compress)
    with pytest.raises(WireError, match=r"damaged on the way|was cut off"):
        [b"".join(chunks) for _, _, chunks in receive_contents(line(data[:-lacking]))]


def test_a_stream_that_goes_on_after_its_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="goes on after its end"):
        list(receive_contents(line(stream([content(tmp_path, b"good")]) + b"more")))


@pytest.mark.parametrize("now", [b"", b"more than ten bytes"])
def test_a_file_that_has_become_shorter_or_longer_is_not_sent(tmp_path: Path, now: bytes) -> None:
    item = content(tmp_path, b"ten bytes!")
    Path(os.fsdecode(item.path)).write_bytes(now)
    with pytest.raises(OSError, match="a stored content was changed"):
        stream([item])


def test_only_what_gets_much_smaller_is_compressed(tmp_path: Path) -> None:
    text = content(tmp_path, b"import torch\n" * 1000)
    noise = content(tmp_path, os.urandom(13_000))
    assert is_compressible([text])
    assert not is_compressible([noise])
    assert not is_compressible([text, noise, content(tmp_path, os.urandom(16_000))])
    assert not is_compressible([])


PROGRAMS = [(each.module, *each.others) for each in (PRESENCE, RECEIVER, COLLECTOR)]


@pytest.mark.parametrize("modules", PROGRAMS)
def test_nothing_is_missing_on_the_way(modules: tuple[str, ...]) -> None:
    for name in modules:
        for node in ast.walk(ast.parse(source(name))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("orc."):
                assert str(node.module) in map(full_name, modules)


def test_the_program_is_small() -> None:
    """It goes to every host with every sync."""
    assert len(RECEIVER.packed) < 20_000
