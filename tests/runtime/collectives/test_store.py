"""The store: what ranks leave each other, and what somebody who is no rank can do to it."""

import contextlib
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from orc.runtime.collectives import store_server
from orc.runtime.collectives.store_server import STRANGERS, RemoteStore, StoreServer, open_store
from orc.runtime.core.store import LocalStore, StoreError, StoreTimeout

KEY = b"k" * 32


@pytest.fixture
def local():
    return LocalStore()


@pytest.fixture
def server(local):
    server = StoreServer(local, KEY, "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def remote(server):
    return RemoteStore("127.0.0.1", server.port, KEY, answer_s=20)


@pytest.fixture(params=["local", "remote"])
def store(request):
    return request.getfixturevalue(request.param)


def test_values_are_written_and_read(store):
    store.set("a", "text")
    store.set("b", bytes(range(256)) * 5000)
    assert store.multi_get(["b", "a"]) == [bytes(range(256)) * 5000, b"text"]
    assert store.get("a") == b"text"
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    assert (store.check(["a", "n"]), store.check(["a", "z"])) == (True, False)
    assert [store.delete_key("a"), store.delete_key("a")] == [True, False]
    store.set("empty", "")
    assert store.get("empty") == b""


def test_a_wait_ends_when_the_last_key_comes(store, local):
    timer = threading.Timer(0.2, local.set, ["late", "now"])
    local.set("early", "")
    timer.start()
    store.wait(["early", "late"], timedelta(seconds=30))
    assert store.get("late") == b"now"


def test_a_wait_ends_in_time(store):
    with pytest.raises(StoreTimeout, match=r"nobody has written never within 0\.05 s"):
        store.wait(["never"], timedelta(seconds=0.05))
    assert not store.check(["never"])  # and the connection is still good


def test_a_clone_answers_while_another_one_waits(remote):
    waiter = threading.Thread(target=remote.wait, args=(["word"], timedelta(seconds=30)))
    waiter.start()
    remote.clone().set("word", "")
    waiter.join(30)
    assert not waiter.is_alive()


def test_another_key_is_refused_on_both_sides(server, local):
    local.set("secret", "x")
    with pytest.raises(StoreError, match="does not accept the key of this run"):
        RemoteStore("127.0.0.1", server.port, b"another").get("secret")
    with socket.create_server(("127.0.0.1", 0)) as pretender:

        def pretend():
            sock, _ = pretender.accept()
            with sock:
                sock.sendall(b"n" * 32)
                sock.recv(4096)
                sock.sendall(b"t" * 32)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(StoreError, match="does not know the key of this run"):
            RemoteStore("127.0.0.1", pretender.getsockname()[1], KEY).get("secret")
        thread.join()


class Trap:
    def __reduce__(self):
        return os._exit, (3,)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps(Trap()) * 20,
        b"\xff" * 100_000,
        b"\x00" * 64 + b"\xff\xff\xff\xff",
    ],
    ids=["silence", "http", "pickle", "noise", "size"],
)
def test_a_stranger_changes_nothing_and_holds_nobody_up(remote, server, local, words):
    local.set("orc/preemption/tick/0", "7")
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(30)]
    try:
        for stranger in strangers:
            with contextlib.suppress(OSError):  # it has been shown the door
                stranger.sendall(words)
        assert remote.get("orc/preemption/tick/0") == b"7"
        assert local.list_keys() == ["orc/preemption/tick/0"]
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_crowd_of_silent_strangers_is_turned_away_after_a_while(remote, server, monkeypatch):
    monkeypatch.setattr(store_server, "GREETING_S", 0.5)
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(STRANGERS + 20)]
    try:
        remote.set("a", "b")
        assert remote.get("a") == b"b"
    finally:
        for stranger in strangers:
            stranger.close()


def test_what_is_changed_on_its_way_ends_the_connection(server, local):
    """Somebody between the two who passes the greeting on, and then changes one byte."""
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay():
            rank, _ = between.accept()
            with rank, socket.create_connection(("127.0.0.1", server.port)) as there:
                rank.sendall(there.recv(32, socket.MSG_WAITALL))
                there.sendall(rank.recv(64, socket.MSG_WAITALL))
                rank.sendall(there.recv(32, socket.MSG_WAITALL))
                question = bytearray(rank.recv(4096))
                question[-1] ^= 1
                there.sendall(question)
                assert there.recv(4096) == b""

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(StoreError):
            RemoteStore("127.0.0.1", between.getsockname()[1], KEY).set("a", "value")
        thread.join()
    assert local.list_keys() == []


def test_rank_0_that_does_not_answer_is_waited_for_as_long_as_was_said():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = RemoteStore("127.0.0.1", silent.getsockname()[1], KEY).clone(answer_s=0.3)
        began = time.monotonic()
        with pytest.raises(StoreTimeout, match="has not answered"):
            store.check(["a"])
        assert time.monotonic() - began < 10


def test_what_came_in_time_is_read_by_a_thread_that_is_late():
    """Another thread has had the interpreter meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_connection(there.getsockname()) as sender:
        receiver, _ = there.accept()
        with receiver:
            sender.sendall(b"answer")
            receiver.recv(6, socket.MSG_PEEK | socket.MSG_WAITALL)
            line = store_server.Connection(receiver)
            assert line._exactly(6, time.monotonic() - 1) == b"answer"
            with pytest.raises(TimeoutError):
                line._exactly(1, time.monotonic() - 1)


def test_a_store_on_all_addresses_is_reached_at_those_of_both_kinds(local):
    hosts = ["127.0.0.1"]
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        hosts.append("::1")  # this machine has both
    server = StoreServer(local, KEY, "")
    try:
        for host in hosts:
            RemoteStore(host, server.port, KEY).set(host, "here")
        assert local.list_keys() == hosts
    finally:
        server.close()


def test_rank_0_that_is_gone_is_an_error(server, remote):
    remote.set("a", "b")
    server.close()
    with pytest.raises(StoreError, match="cannot be reached"):
        RemoteStore("127.0.0.1", 9, KEY).get("a")


def test_a_forked_child_takes_a_connection_of_its_own(remote, server):
    remote.set("a", "parent")
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if remote.get("a") == b"parent" and all(sock.fileno() < 0 for sock in server._socks) else 1)
        finally:
            os._exit(2)
    assert remote.get("a") == b"parent"
    assert os.waitpid(pid, 0)[1] == 0
    assert remote.get("a") == b"parent"


def test_the_key_is_handed_round_only_where_the_launcher_gave_none():
    noted = []

    def hand_round(note):
        noted.append(note) if note is not None else None
        return noted[-1]

    first, made = open_store(0, None, "127.0.0.1", "", hand_round)
    second, known = open_store(1, None, "", "127.0.0.1", hand_round)
    first.set("a", "1")
    assert second.get("a") == b"1"
    assert made == known
    first, made = open_store(0, KEY, "127.0.0.1", "", hand_round)
    second, known = open_store(1, KEY, "", "127.0.0.1", hand_round)
    first.set("a", "2")
    assert second.get("a") == b"2"
    assert made == known == KEY
    assert KEY.hex().encode() not in noted[-1]
    with pytest.raises(StoreError, match=r"ORC_TOKEN.* rank 1 has not"):
        open_store(1, None, "", "127.0.0.1", hand_round)


def test_who_waits_for_a_key_is_not_woken_by_others():
    class Counting(LocalStore):
        waits = 0

        def _wait(self, missing, seconds):
            self.waits += 1  # under the lock of the store
            super()._wait(missing, seconds)

    store = Counting()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store.wait, ["verdict", f"own/{number}"], timedelta(seconds=30)) for number in range(8)]
        while store.waits < 8:
            time.sleep(0.001)
        for number in range(50):
            store.set(f"other/{number}", "")
        store.set("verdict", "")
        for number in range(8):
            store.set(f"own/{number}", "")
        for one in waiting:
            one.result()
    assert store.waits == 8
