"""The connection between a rank and the store: messages that only ranks of the run can send, and read.

Both ends prove that they know the run's key before anything is read, and every message carries a tag over its content
and its place in the order. Messages are JSON and plain bytes. They are not encrypted: docs/explanation/threat-model.md
says what this protects from.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any

from orc.runtime.core.store import StoreError

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
