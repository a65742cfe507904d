"""Connection of the link: JSON lines over TLS, and the records of an attempt that travel over it.

The two ends know each other by the attempt's token: a certificate with its key, made for this attempt alone and held by
all of its nodes. Each end shows it, and trusts nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
import tempfile
import time

from orc.launchers.agent.errors import log_stderr
from orc.launchers.agent.messages import decode_message, encode_message
from orc.launchers.agent.records import create_json, read_json, refresh_json

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


OWN = re.compile(r"node-(\d{1,6})/(lease|heartbeat|exit)\.json")
HEARTBEAT = re.compile(r"node-\d{1,6}/heartbeat\.json")
COMMON = re.compile(r"(stop-r\d{1,6}|cancel)\.json")
RENDEZVOUS = re.compile(r"rendezvous-r\d{1,6}\.json")
CALL = re.compile(r"calls/[A-Za-z0-9_-]{1,100}(\.done|\.end)?\.json")
STACKS = re.compile(r"stacks/[A-Za-z0-9_-]{1,100}(?:\.node-(\d{1,6}))?\.json")


class Files:
    """The records of the attempt directory on this host: what is new here, and what comes from elsewhere."""

    def __init__(self, directory: str, node: int, restart: int) -> None:
        self.directory = directory
        self.fixed = [f"stop-r{restart}.json", "cancel.json", f"rendezvous-r{restart}.json"]
        self.fixed += [f"node-{node}/{name}.json" for name in ("lease", "heartbeat", "exit")]
        self.known: dict[str, tuple[int, int, int]] = {}  # what the content that everybody has looked like

    def changed(self) -> dict[str, dict[str, Any]]:
        """Records that are new or different since the last call, but for those that came from elsewhere."""
        names = list(self.fixed)
        for folder in ("calls", "stacks"):
            try:
                entries = os.listdir(os.path.join(self.directory, folder))
            except FileNotFoundError:
                continue
            # These are written once. Names with two more dots are temporary.
            names += [f"{folder}/{entry}" for entry in entries if f"{folder}/{entry}" not in self.known]
        found = {}
        for name in names:
            path = os.path.join(self.directory, name)
            signature = _signature(path)
            if signature is None or signature == self.known.get(name) or not is_record(name):
                continue
            record = read_json(path)
            if record is not None:
                self.known[name] = signature
                found[name] = record
        return found

    def store(self, name: str, record: Mapping[str, Any]) -> bool:
        """Write what came from elsewhere; False when something else counts here, or the directory was removed."""
        path = os.path.join(self.directory, name)
        if not os.path.isdir(self.directory):
            return False
        try:
            if not HEARTBEAT.fullmatch(name) and read_json(path) == record:  # no two heartbeats are the same
                return True
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            if name.startswith("stop-"):  # the first one counts, on every host
                if not create_json(path, record):
                    return False
            else:
                refresh_json(path, record, durable=name.endswith("/exit.json"))
        except OSError as error:
            log_stderr(f"link: cannot write {path}: {error}")
            return True  # the others may have room for it
        signature = _signature(path)
        if signature is not None:
            self.known[name] = signature
        return True


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def is_record(name: str) -> bool:
    """Return whether *name* is one of the files that travel: never a path that leads anywhere else."""
    return any(pattern.fullmatch(name) for pattern in (OWN, COMMON, RENDEZVOUS, CALL, STACKS))


def may_send(node: int, name: str) -> bool:
    """Return whether the client *node* may send this to the server: its own records and what concerns all."""
    own = OWN.fullmatch(name)
    answer = STACKS.fullmatch(name)
    if own:
        return int(own[1]) == node
    if answer:
        return answer[1] is None or int(answer[1]) == node
    return bool(COMMON.fullmatch(name) or CALL.fullmatch(name))


def concerns(node: int, name: str, record: Mapping[str, Any]) -> bool:
    """Return whether the server passes this on to the client *node*."""
    own = OWN.fullmatch(name)
    if own:
        return own[1] == "0"
    if CALL.fullmatch(name):
        return bool(record.get("from" if name.endswith(".done.json") else "node") == node)
    answer = STACKS.fullmatch(name)
    return answer is None or answer[1] is None
