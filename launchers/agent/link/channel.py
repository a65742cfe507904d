"""Connection of the link: JSON lines over TLS, whose two ends know each other by the attempt's token.

The token is a certificate with its key, made for this attempt alone and held by all of its nodes: each end shows it,
and trusts nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import tempfile
import time

from orc.launchers.agent.messages import decode_message, encode_message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

VERSION = 2  # of what is said over it
MESSAGE_BYTES = 1 << 20
_MEMORY = "/dev/shm"  # noqa: S108 - what is written there has no name


class PeerDisconnected(Exception):
    """The connection cannot be used any more; the message says why.

    *closed*: the other host has closed it, so the host is there, and its process perhaps not. A cut does not say so.
    """

    def __init__(self, why: str, closed: bool = False) -> None:
        super().__init__(why)
        self.closed = closed


def tls_context(token: str, *, server: bool) -> ssl.SSLContext:
    """Return the settings of connections between holders of *token*."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # the key says who it is, under whatever address
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=token)
    # It is read from a file alone: one without a name, and not on a disk, which may be full.
    with tempfile.TemporaryFile(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None) as file:
        file.write(token.encode())
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


class Channel:
    """Messages over one stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.heard = self.spoke = time.monotonic()
        self.node: int | None = None  # of the other side, once that is certain
        self.pending: dict[str, None] = {}  # names that have to be sent, in order
        self.due = asyncio.Event()  # something is to be sent
        self.sent = self.acknowledged = 0  # records that we sent, and how many of them have been stored over there
        self.received = self.confirmed = 0  # records that came, and how many of them we have confirmed
        self.closed_because = ""  # by this side

    @classmethod
    async def connected(cls, address: str, port: int, context: ssl.SSLContext) -> Channel:
        """Return a connection to the server. Raises `PeerDisconnected`, and `OSError` without an answer."""
        try:
            return cls(*await asyncio.open_connection(address, port, ssl=context, limit=MESSAGE_BYTES))
        except (ssl.SSLError, ConnectionResetError) as error:
            raise _disconnected(error) from None

    @classmethod
    async def accepted(cls, sock: socket.socket, context: ssl.SSLContext) -> Channel:
        """Return the connection of a client. Raises `OSError` for one without the token."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the handshake waits 40 ms for a confirmation
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MESSAGE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one message."""
        self.writer.write(encode_message(message))
        self.spoke = time.monotonic()

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises `PeerDisconnected`."""
        try:
            message = decode_message(await self.reader.readuntil(b"\n"))
        except asyncio.IncompleteReadError:
            why = self.closed_because
            raise PeerDisconnected(why or "it has closed the connection", closed=not why) from None
        except OSError as error:
            raise _disconnected(error) from None
        except (asyncio.LimitOverrunError, ValueError):
            raise PeerDisconnected("it does not speak this protocol") from None
        self.heard = time.monotonic()
        return message

    async def drain(self) -> None:
        """Wait until the kernel has taken most of what was sent. Raises `PeerDisconnected`."""
        try:
            await self.writer.drain()
        except OSError as error:
            raise _disconnected(error) from None

    def close(self, why: str) -> None:
        """End the connection at once; whoever waits for a message gets `PeerDisconnected`."""
        self.closed_because = self.closed_because or why
        self.writer.transport.abort()

    @property
    def delivered(self) -> bool:
        """Return whether the other side has stored everything that it is to have."""
        return not self.pending and self.sent == self.acknowledged


def _disconnected(error: OSError) -> PeerDisconnected:
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerDisconnected("it does not know the attempt's token")
    closed = isinstance(error, ssl.SSLEOFError) or error.errno in (errno.ECONNRESET, errno.EPIPE)
    return PeerDisconnected(error.strerror or str(error) or "it has closed the connection", closed)
