"""Rank 0's store, served over TCP to the other ranks of the run, and what they see of it.

Both ends of a connection prove that they know the run's key before anything is read, and every message carries a tag
over its content and its place in the order: only ranks of the run can send messages. They are JSON and plain bytes, and
not encrypted: docs/explanation/threat-model.md says what this protects from.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

from orc.runtime.core.store import ANSWER_S, LocalStore, Store, StoreError, StoreTimeout

CONNECT_S = 60.0
STRANGERS = 256  # connections at once that have not proven yet who they are
GREETING_S = 10.0  # for somebody who connects to prove who they are
MESSAGE_BYTES = 64 << 20
_NONCE, _TAG = 32, 32


class Connection:
    """Connection that carries messages of bytes, each tagged over its place and content once both ends have a key."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._keys = (b"", b"")  # what we sign with, what they sign with
        self._sent = self._received = 0

    def greet(self, key: bytes, deadline: float) -> None:
        """The side that has connected. Raises `StoreError` when the other one has another *key*."""
        theirs, ours = self._exactly(_NONCE, deadline), os.urandom(_NONCE)
        self.sock.sendall(ours + _tag(key, b"rank", theirs, ours))
        try:
            proof = self._exactly(_TAG, deadline)
        except ConnectionError:
            raise StoreError("whoever listens there does not accept the key of this run") from None
        if not hmac.compare_digest(proof, _tag(key, b"store", theirs, ours)):
            raise StoreError("whoever listens there does not know the key of this run")
        self._keys = (_tag(key, b"up", theirs, ours), _tag(key, b"down", theirs, ours))

    def receive_greeting(self, key: bytes) -> None:
        """Greet as the side that was connected to; reveals nothing about *key* to a peer without it."""
        deadline = time.monotonic() + GREETING_S
        ours = os.urandom(_NONCE)
        self.sock.sendall(ours)
        theirs = self._exactly(_NONCE, deadline)
        if not hmac.compare_digest(self._exactly(_TAG, deadline), _tag(key, b"rank", ours, theirs)):
            raise StoreError("somebody connected who does not know the key of this run")
        self.sock.sendall(_tag(key, b"store", ours, theirs))
        self._keys = (_tag(key, b"down", ours, theirs), _tag(key, b"up", ours, theirs))

    def send(self, head: Any, body: bytes = b"") -> None:
        """Send *head*, of JSON's kinds, and *body*. Raises `StoreError` where they are more than `MESSAGE_BYTES`."""
        line = json.dumps(head).encode() + b"\n"
        size = len(line) + len(body)
        if size > MESSAGE_BYTES:
            raise StoreError(f"a message of {size} bytes; the store takes {MESSAGE_BYTES} at most")
        tag = _tag(self._keys[0], struct.pack(">Q", self._sent), line, body)
        self._sent += 1
        front = struct.pack(">I", size) + tag + line
        if size < 65536:
            self.sock.sendall(front + body)
        else:  # a large one is not copied
            self.sock.sendall(front)
            self.sock.sendall(body)

    def receive(self, timeout_s: float | None) -> tuple[Any, bytes]:
        """Return head and body of the next message. Raises `StoreError` for one that was changed, `TimeoutError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = struct.unpack(">I", self._exactly(4, deadline))
        if size > MESSAGE_BYTES:
            raise StoreError("a message that is larger than any")
        tag, content = self._exactly(_TAG, deadline), self._exactly(size, deadline)
        if not hmac.compare_digest(tag, _tag(self._keys[1], struct.pack(">Q", self._received), content)):
            raise StoreError("a message was changed on its way")
        self._received += 1
        end = content.index(b"\n")
        return json.loads(content[:end]), bytes(memoryview(content)[end + 1 :])

    def _exactly(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            # A thread that comes late because another one had the interpreter takes what has come in time.
            self.sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0))
            try:
                count = self.sock.recv_into(view[at:])
            except BlockingIOError:
                raise TimeoutError from None
            if not count:
                raise ConnectionResetError("the connection was closed")
            at += count
        self.sock.settimeout(None)
        return data


def _tag(key: bytes, *parts: bytes | bytearray) -> bytes:
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.digest()


class StoreServer:
    """Answers for *store* on a port of *address*, each connection in a thread of its own.

    Args:
        store: what is served.
        key: of the run.
        address: of this host, ``""`` for all of them.
    """

    def __init__(self, store: LocalStore, key: bytes, address: str) -> None:
        self._store = store
        self._key = key
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=512, dualstack_ipv6=both)
        self.port: int = self._listener.getsockname()[1]
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._socks: WeakSet[socket.socket] = WeakSet()
        _servers.add(self)
        threading.Thread(target=self._accept, name="orc-store", daemon=True).start()

    def close(self) -> None:
        """Close the server; no request is answered any more."""
        for sock in (self._listener, *self._socks):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # no file descriptors left: they come back
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()  # a rank comes again
                continue
            self._socks.add(sock)
            try:
                threading.Thread(target=self._serve, args=(sock,), name="orc-store", daemon=True).start()
            except RuntimeError:  # no room for a thread
                self._strangers.release()
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            connection = Connection(sock)
            try:
                connection.receive_greeting(self._key)
            finally:
                self._strangers.release()
            while True:
                (name, keys, number), body = connection.receive(None)
                connection.send(*self._answer(name, keys, number, body))
        except (OSError, StoreError, ValueError, TypeError):
            return  # it has gone, or is no rank of this run: neither is the run's concern
        finally:
            sock.close()

    def _answer(self, name: str, keys: list[str], number: float, body: bytes) -> tuple[Any, bytes]:
        store = self._store
        said: Any = None
        try:
            if name == "set":
                store.set(keys[0], body)
            elif name == "get":
                values = store.multi_get(keys)
                return [len(value) for value in values], b"".join(values)
            elif name == "add":
                said = store.add(keys[0], int(number))
            elif name == "check":
                said = store.check(keys)
            elif name == "wait":
                store.wait(keys, timedelta(seconds=number))
            elif name == "delete":
                said = store.delete_key(keys[0])
            else:
                raise ValueError(name)
        except StoreTimeout as error:
            said = {"late": str(error)}
        return said, b""


class RemoteStore:
    """Rank 0's store as another process sees it, over one connection that is opened when it is first needed.

    Args:
        host: where rank 0 is.
        port: that of its `StoreServer`.
        key: of the run.
        answer_s: how long an answer may take, in seconds.
    """

    def __init__(self, host: str, port: int, key: bytes, answer_s: float = ANSWER_S) -> None:
        self.host = host
        self.port = port
        self._key = key
        self._answer_s = answer_s
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        _remote.add(self)

    def clone(self, answer_s: float = ANSWER_S) -> RemoteStore:
        """See `Store`."""
        return RemoteStore(self.host, self.port, self._key, answer_s)

    def set(self, key: str, value: str | bytes) -> None:
        """See `Store`."""
        self._ask("set", [key], body=value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """See `Store`."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `Store`."""
        sizes, body = self._ask("get", keys, more_s=ANSWER_S)
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [body[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def add(self, key: str, amount: int) -> int:
        """See `Store`."""
        return int(self._ask("add", [key], amount)[0])

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store`."""
        return bool(self._ask("check", keys)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """See `Store`."""
        seconds = timeout.total_seconds()
        self._ask("wait", keys, seconds, more_s=seconds)

    def delete_key(self, key: str) -> bool:
        """See `Store`."""
        return bool(self._ask("delete", [key])[0])

    def _ask(
        self, name: str, keys: Iterable[str], number: float = 0, body: bytes = b"", more_s: float = 0.0
    ) -> tuple[Any, bytes]:
        with self._lock:
            try:
                connection = self._connection = self._connection or self._connect()
                connection.sock.settimeout(self._answer_s)
                connection.send([name, list(keys), number], body)
                head, body = connection.receive(self._answer_s + more_s)
            except TimeoutError:
                self._drop()
                raise StoreTimeout(
                    f"rank 0 at {self.host} has not answered for {self._answer_s + more_s:g} s"
                ) from None
            except (OSError, ValueError) as error:
                self._drop()
                raise StoreError(f"rank 0 at {self.host} port {self.port} cannot be reached: {error}") from error
            except BaseException:  # interrupted half-way: the next answer would be that to this question
                self._drop()
                raise
        if isinstance(head, dict):
            raise StoreTimeout(head["late"])
        return head, body

    def _connect(self) -> Connection:
        deadline = time.monotonic() + min(CONNECT_S, self._answer_s)
        while True:
            sock = None
            try:
                sock = socket.create_connection((self.host, self.port), timeout=max(deadline - time.monotonic(), 0.1))
                connection = Connection(sock)
                connection.greet(self._key, deadline)
                return connection
            except StoreError:
                if sock is not None:
                    sock.close()
                raise
            except OSError as error:
                if sock is not None:
                    sock.close()
                # Too many came at once.
                if not isinstance(error, ConnectionResetError) or time.monotonic() > deadline - 1:
                    raise
                time.sleep(0.2)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.sock.close()

    def _forget(self) -> None:
        """In a forked child: the connection is the parent's, and another thread may have held the lock."""
        self._lock = threading.Lock()
        self._drop()


def open_store(
    rank: int, key: bytes | None, address: str, reached_at: str, hand_round: Callable[[bytes | None], bytes]
) -> tuple[Store, bytes]:
    """The store of a run and its key; all ranks call it.

    Args:
        rank: of this process; rank 0 serves.
        key: of the run, known to all ranks beforehand; without one rank 0 makes one.
        address: of rank 0's host, to listen on; empty for all.
        reached_at: what this process calls rank 0's host, where rank 0 listens on all addresses.
        hand_round: gives rank 0's bytes to every rank.

    Raises:
        StoreError: rank 0 has a key and this rank has none.
    """
    if rank == 0:
        store = LocalStore()
        ours = key or os.urandom(32)
        server = StoreServer(store, ours, address)
        note = {"host": address, "port": server.port, "key": None if key else ours.hex()}
        hand_round(json.dumps(note).encode())
        return store, ours
    note = json.loads(hand_round(None))
    if key is None:
        if note["key"] is None:
            raise StoreError(
                f"rank 0 has the key of the attempt (ORC_TOKEN) in its environment, and rank {rank} has not"
            )
        key = bytes.fromhex(note["key"])
    return RemoteStore(note["host"] or reached_at, int(note["port"]), key), key


def _after_fork() -> None:
    # A worker must not keep connections of its rank open: who is at the other end has to see when the rank ends.
    for server in list(_servers):
        server.close()
    for store in list(_remote):
        store._forget()


_servers: WeakSet[StoreServer] = WeakSet()
_remote: WeakSet[RemoteStore] = WeakSet()
os.register_at_fork(after_in_child=_after_fork)
