"""One connection of the link: both sides prove that they know the attempt's token, then every message is signed.

What a message says is
decided by the endpoints.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import socket
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

VERSION = 1  # of what is said over it
FRAME_BYTES = 1 << 20
_GREETING_BYTES = 4096
_TAG = 32
_NONCE = 32


class PeerDisconnected(Exception):
    """The connection cannot be used any more; the message says why.

    *closed*: the other host has closed it, so the host is there, and its process perhaps not. A cut does not say so.
    """

    def __init__(self, why: str, closed: bool = False) -> None:
        super().__init__(why)
        self.closed = closed


def _broken(error: OSError) -> PeerDisconnected:
    return PeerDisconnected(error.strerror or str(error), closed=error.errno in (errno.ECONNRESET, errno.EPIPE))


class Channel:
    """Frames over one socket: length, JSON, and a tag over the JSON and its place in the order of frames."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.token = token
        self.opened = self.heard = self.spoke = time.monotonic()
        self.node: int | None = None  # who is on the other side, once that is certain
        self.nonces = b""
        self.keys: tuple[bytes, bytes] | None = None  # what we sign with, what they sign with
        self.pending: dict[str, None] = {}  # names that have to be sent, in order
        self.sent = self.acknowledged = 0  # records that we sent, and how many of them have been stored over there
        self.received = self.confirmed = 0  # records that came, and how many of them we have confirmed
        self._in = bytearray()
        self._out = bytearray()
        self._numbers = [0, 0]

    def _tag(self, key: bytes, number: int, payload: bytes) -> bytes:
        return hmac.new(key, struct.pack(">Q", number) + payload, hashlib.sha256).digest()

    def greet(self, label: bytes, message: Mapping[str, Any]) -> None:
        """A frame of the handshake: signed with the token, over both sides' random numbers so far."""
        payload = json.dumps(message).encode()
        tag = hmac.new(self.token, label + self.nonces + payload, hashlib.sha256).digest()
        self._out += struct.pack(">I", len(payload)) + payload + tag

    def greeting(self, label: bytes) -> dict[str, Any] | None:
        """The next frame of the handshake, if it is here. Raises `PeerDisconnected` when the token is not the same."""
        found = self._frame()
        if found is None:
            return None
        payload, tag = found
        if label and not hmac.compare_digest(
            tag, hmac.new(self.token, label + self.nonces + payload, hashlib.sha256).digest()
        ):
            raise PeerDisconnected("it does not know the attempt's token")
        return self._object(payload)

    def agree(self, hub: bool) -> None:
        """The handshake is over: keys of this connection alone, one for each direction."""
        keys = [hmac.new(self.token, label + self.nonces, hashlib.sha256).digest() for label in (b"down", b"up")]
        self.keys = (keys[0], keys[1]) if hub else (keys[1], keys[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one message."""
        if self.keys is None:
            raise AssertionError("before the handshake")
        payload = json.dumps(message, ensure_ascii=False).encode()
        self._out += struct.pack(">I", len(payload)) + payload + self._tag(self.keys[0], self._numbers[0], payload)
        self._numbers[0] += 1

    def receive(self) -> dict[str, Any] | None:
        """The next message, if it is here. Raises `PeerDisconnected` for one that was changed on the way."""
        found = self._frame() if self.keys else None
        if found is None or self.keys is None:
            return None
        payload, tag = found
        if not hmac.compare_digest(tag, self._tag(self.keys[1], self._numbers[1], payload)):
            raise PeerDisconnected("a message was changed on the way")
        self._numbers[1] += 1
        return self._object(payload)

    def _frame(self) -> tuple[bytes, bytes] | None:
        if len(self._in) < 4:
            return None
        (length,) = struct.unpack_from(">I", self._in)
        if length > (FRAME_BYTES if self.keys else _GREETING_BYTES):
            raise PeerDisconnected("it does not speak this protocol")
        if len(self._in) < 4 + length + _TAG:
            return None
        payload, tag = bytes(self._in[4 : 4 + length]), bytes(self._in[4 + length : 4 + length + _TAG])
        del self._in[: 4 + length + _TAG]
        return payload, tag

    def _object(self, payload: bytes) -> dict[str, Any]:
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise PeerDisconnected("it does not speak this protocol")
        return message

    def read(self) -> None:
        """Take in what has arrived. Raises `PeerDisconnected`."""
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise _broken(error) from None
        if not data:
            raise PeerDisconnected("it has closed the connection", closed=True)
        self._in += data
        self.heard = time.monotonic()

    def flush(self) -> None:
        """Give to the kernel what it takes. Raises `PeerDisconnected`."""
        if not self._out:
            return
        try:
            count = self.sock.send(self._out)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise _broken(error) from None
        del self._out[:count]
        self.spoke = time.monotonic()

    @property
    def waiting(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._out)

    @property
    def delivered(self) -> bool:
        """Whether the other side has stored everything that it is to have."""
        return not self.pending and self.sent == self.acknowledged


def nonce_in(message: Mapping[str, Any]) -> bytes:
    """The random number of the other side. Raises `PeerDisconnected` when there is none."""
    try:
        nonce = bytes.fromhex(str(message.get("nonce")))
    except ValueError:
        nonce = b""
    if len(nonce) != _NONCE:
        raise PeerDisconnected("it does not speak this protocol")
    return nonce
