"""Connection of the link: both sides prove that they know the attempt's token, then every message is signed.

Frames over an asyncio stream: length, JSON, and HMAC-SHA-256 over the JSON and its place in the order of frames. Not
`multiprocessing.connection`: its handshake is HMAC-MD5 on Python < 3.12 and leaves no key to sign messages with, and
it blocks on a peer that sends half a message.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
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


class Channel:
    """Frames over one stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> None:
        self.reader, self.writer, self.token = reader, writer, token
        self.heard = self.spoke = time.monotonic()
        self.node: int | None = None  # of the other side, once that is certain
        self.nonces = b""
        self.keys: tuple[bytes, bytes] | None = None  # what we sign with, what they sign with
        self.pending: dict[str, None] = {}  # names that have to be sent, in order
        self.due = asyncio.Event()  # something is to be sent
        self.sent = self.acknowledged = 0  # records that we sent, and how many of them have been stored over there
        self.received = self.confirmed = 0  # records that came, and how many of them we have confirmed
        self.closed_because = ""  # by this side
        self._numbers = [0, 0]

    def greet(self, label: bytes, message: Mapping[str, Any]) -> None:
        """Send a frame of the handshake: signed with the token, over both sides' random numbers so far."""
        self._write(json.dumps(message).encode(), self.token, label + self.nonces)

    async def greeting(self, label: bytes) -> dict[str, Any]:
        """Return the next frame of the handshake. Raises `PeerDisconnected` when the token is not the same."""
        payload, tag = await self._frame(_GREETING_BYTES)
        if label and not hmac.compare_digest(tag, _sign(self.token, label + self.nonces + payload)):
            raise PeerDisconnected("it does not know the attempt's token")
        return _object(payload)

    def agree(self, hub: bool) -> None:
        """End the handshake: keys of this connection alone, one for each direction."""
        keys = [_sign(self.token, label + self.nonces) for label in (b"down", b"up")]
        self.keys = (keys[0], keys[1]) if hub else (keys[1], keys[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one message."""
        if self.keys is None:
            raise AssertionError("before the handshake")
        payload = json.dumps(message, ensure_ascii=False).encode()
        self._write(payload, self.keys[0], self._numbers[0].to_bytes(8, "big"))
        self._numbers[0] += 1

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises `PeerDisconnected`, also for one that was changed, repeated or left out."""
        if self.keys is None:
            raise AssertionError("before the handshake")
        payload, tag = await self._frame(FRAME_BYTES)
        if not hmac.compare_digest(tag, _sign(self.keys[1], self._numbers[1].to_bytes(8, "big") + payload)):
            raise PeerDisconnected("a message was changed on the way")
        self._numbers[1] += 1
        return _object(payload)

    async def drain(self) -> None:
        """Wait until the kernel has taken most of what was sent. Raises `PeerDisconnected`."""
        try:
            await self.writer.drain()
        except OSError as error:
            raise _disconnected(error) from None

    def close(self, why: str) -> None:
        """End the connection at once; whoever waits for a frame gets `PeerDisconnected`."""
        self.closed_because = self.closed_because or why
        self.writer.transport.abort()

    def _write(self, payload: bytes, key: bytes, context: bytes) -> None:
        self.writer.write(len(payload).to_bytes(4, "big") + payload + _sign(key, context + payload))
        self.spoke = time.monotonic()

    async def _frame(self, limit: int) -> tuple[bytes, bytes]:
        try:
            length = int.from_bytes(await self.reader.readexactly(4), "big")
            if length > limit:
                raise PeerDisconnected("it does not speak this protocol")
            data = await self.reader.readexactly(length + _TAG)
        except asyncio.IncompleteReadError:
            why = self.closed_because
            raise PeerDisconnected(why or "it has closed the connection", closed=not why) from None
        except OSError as error:
            raise _disconnected(error) from None
        self.heard = time.monotonic()
        return data[:length], data[length:]

    @property
    def delivered(self) -> bool:
        """Return whether the other side has stored everything that it is to have."""
        return not self.pending and self.sent == self.acknowledged


def _sign(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def _disconnected(error: OSError) -> PeerDisconnected:
    return PeerDisconnected(error.strerror or str(error), closed=error.errno in (errno.ECONNRESET, errno.EPIPE))


def _object(payload: bytes) -> dict[str, Any]:
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise PeerDisconnected("it does not speak this protocol")
    return message


def nonce_in(message: Mapping[str, Any]) -> bytes:
    """Return the random number of the other side. Raises `PeerDisconnected` when there is none."""
    try:
        nonce = bytes.fromhex(str(message.get("nonce")))
    except ValueError:
        nonce = b""
    if len(nonce) != _NONCE:
        raise PeerDisconnected("it does not speak this protocol")
    return nonce
