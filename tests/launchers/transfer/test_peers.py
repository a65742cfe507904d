"""Hosts serving each other: only to those who know the token, once, and only what they may have."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orc.launchers.transfer import peers
from orc.launchers.transfer.peers import PeerError, PeerServer, Shelf, fetch, own_addresses, token_for
from orc.launchers.transfer.wire import Channel, receive_contents

HERE = ("127.0.0.1",)


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, bytes]:
    """Contents of a store: hash to bytes."""
    (tmp_path / "cas").mkdir()
    found = {}
    for data in (b"first", b"second", os.urandom(500_000), b""):
        name = hashlib.sha256(data).hexdigest()
        (tmp_path / "cas" / name).write_bytes(data)
        found[name] = data
    return found


@pytest.fixture
def shelf(tmp_path: Path, contents: dict[str, bytes]) -> Shelf:
    """All contents are here."""
    return Shelf(tmp_path / "cas", tmp_path / "objects", {name: len(data) for name, data in contents.items()}, ())


@pytest.fixture
def server(shelf: Shelf) -> Iterator[PeerServer]:
    serving = PeerServer(shelf, "secret")
    yield serving
    serving.close()


def get(server: PeerServer, wanted: list[str], label: str = "a", token: str | None = None) -> dict[str, bytes]:
    found: dict[str, bytes] = {}

    def take(channel: Channel) -> None:
        for name, _, chunks in receive_contents(channel, False):
            found[name] = b"".join(chunks)

    fetch(HERE, server.port, label, token or token_for("secret", label), wanted, take)
    return found


def test_contents_are_served(server: PeerServer, contents: dict[str, bytes]) -> None:
    assert get(server, list(contents)) == contents


def test_a_token_is_good_once(server: PeerServer, contents: dict[str, bytes]) -> None:
    get(server, [])
    with pytest.raises(PeerError, match="refused"):
        get(server, list(contents))
    assert get(server, list(contents), label="b") == contents


@pytest.mark.parametrize("token", ["", "0" * 64, token_for("secret", "b"), token_for("other", "a")])
def test_without_the_token_nothing_is_served(server: PeerServer, contents: dict[str, bytes], token: str) -> None:
    with pytest.raises(PeerError, match="refused"):
        get(server, list(contents), token=token or "x")


def test_nothing_else_is_served(server: PeerServer, tmp_path: Path, contents: dict[str, bytes]) -> None:
    other = hashlib.sha256(b"of another job").hexdigest()
    (tmp_path / "cas" / other).write_bytes(b"of another job")
    (tmp_path / "ledger.db").write_text("private")
    first = next(iter(contents))
    assert get(server, [other, "../ledger.db", "", first]) == {first: contents[first]}


def test_what_is_on_its_way_is_passed_on_when_it_has_come(
    tmp_path: Path, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_IDLE_S", 0.05)
    sizes = {name: len(data) for name, data in contents.items()}
    late = sorted(contents)[1]
    (tmp_path / "objects").mkdir()
    (tmp_path / "cas" / late).rename(tmp_path / "arriving")
    shelf = Shelf(tmp_path / "cas", tmp_path / "objects", sizes, {late})
    server = PeerServer(shelf, "secret")
    found: list[dict[str, bytes]] = []
    thread = threading.Thread(target=lambda: found.append(get(server, sorted(contents))))
    thread.start()
    thread.join(0.3)  # several signs of life pass meanwhile
    assert thread.is_alive()
    (tmp_path / "arriving").rename(tmp_path / "objects" / late)
    shelf.arrived(late)
    thread.join(60)
    server.close()
    assert found == [contents]


def test_somebody_else_at_the_address_is_noticed() -> None:
    """Another machine may have the address that the laptop was told, in another network."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection, contextlib.suppress(Exception):
                channel = peers._over(connection)
                channel.send("peer", challenge="0")
                channel.receive()
                channel.send("welcome", proof="0" * 64)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PeerError, match="somebody else answers there"):
            fetch(HERE, port, "a", token_for("secret", "a"), [], lambda _: None)


def test_all_addresses_are_tried_and_named(server: PeerServer, contents: dict[str, bytes]) -> None:
    server.close()
    with pytest.raises(PeerError) as caught:
        fetch(("127.0.0.1", "127.0.0.2"), server.port, "a", "t", [], lambda _: None)
    assert f"127.0.0.1 port {server.port}: Connection refused" in str(caught.value)
    assert f"127.0.0.2 port {server.port}: Connection refused" in str(caught.value)
    with pytest.raises(PeerError, match="no address"):
        fetch((), server.port, "a", "t", [], lambda _: None)


def test_a_server_that_goes_away_in_the_middle_is_told_from_trouble_here(
    server: PeerServer, contents: dict[str, bytes]
) -> None:
    def full(_: Channel) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fetch(HERE, server.port, "a", token_for("secret", "a"), list(contents), full)


def test_a_host_that_is_slow_to_answer_is_waited_for(
    server: PeerServer, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = server._serve

    def slowly(connection: socket.socket) -> None:
        time.sleep(0.5)
        serve(connection)

    monkeypatch.setattr(peers, "CONNECT_S", 0.2)
    monkeypatch.setattr(server, "_serve", slowly)
    assert get(server, list(contents)) == contents


def test_a_stranger_that_says_nothing_keeps_nobody_from_being_served(
    server: PeerServer, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_SILENCE_S", 120.0)
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    began = time.monotonic()
    assert get(server, list(contents)) == contents
    assert time.monotonic() - began < 60
    for stranger in strangers:
        stranger.close()


def test_the_address_that_the_laptop_reached_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.9.0.1 50000 10.9.0.7 22")
    assert own_addresses()[0] == "10.9.0.7"
    monkeypatch.delenv("SSH_CONNECTION")
    assert own_addresses()[-1] == "127.0.0.1"


def test_a_host_with_many_addresses_names_a_few_and_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_interface_addresses", lambda: ["127.0.0.1", *(f"10.0.{n}.1" for n in range(9))])
    monkeypatch.setenv("SSH_CONNECTION", "10.9.0.1 50000 10.0.3.1 22")
    assert own_addresses() == ["10.0.3.1", "10.0.0.1", "10.0.1.1", "10.0.2.1", "127.0.0.1"]
