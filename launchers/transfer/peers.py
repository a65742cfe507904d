"""Hosts passing contents on to each other: a listener that serves, once per token, what is here or is on its way here.

The token comes to both over their own channels to the laptop. Each proves to the other that it knows it; what arrives
is verified by its hash in any case. Contents travel in the clear, as everything does between the ranks of a job.

Travels to the hosts as it is: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from orc.launchers.transfer.wire import Channel, Content, Message, WireError, deflate, inflate, send_contents

CONNECT_S = 2.0  # for each address of a peer
_SILENCE_S = 8.0  # of a peer, after which it is gone
_IDLE_S = 2.0  # how often a fetcher hears that what it waits for is on its way
_AT_ONCE = 16  # connections that a server talks to; a stranger can keep no more threads busy


class PeerError(Exception):
    """The peer cannot be reached, is not who it should be, or went away."""


def token_for(secret: str, label: str) -> str:
    """The token of one transfer: good once, for the fetcher that was given it."""
    return hmac.new(secret.encode(), label.encode(), hashlib.sha256).hexdigest()


def _proof(token: str, role: str, *nonces: str) -> str:
    return hmac.new(token.encode(), "\0".join((role, *nonces)).encode(), hashlib.sha256).hexdigest()


def _over(connection: socket.socket) -> Channel:
    """Messages over *connection*, whose troubles are told from those of the disk."""

    def read(size: int) -> bytes:
        try:
            return connection.recv(min(size, 1 << 18))
        except OSError as error:
            raise WireError(error.strerror or str(error)) from None

    def write(data: bytes) -> None:
        try:
            connection.sendall(data)
        except OSError as error:
            raise WireError(error.strerror or str(error)) from None

    return Channel(read, write)


class Shelf:
    """The contents of some snapshots: in ``cas/``, or in *objects* as soon as they `arrived`."""

    def __init__(self, cas: Path, objects: Path, sizes: Mapping[str, int], awaited: Iterable[str]) -> None:
        self._cas, self._objects = os.fsencode(cas), os.fsencode(objects)
        self._sizes = dict(sizes)
        self._awaited = set(awaited)
        self._changed = threading.Condition()

    def arrived(self, digest: str) -> None:
        """It lies in *objects*, verified, or has moved on to ``cas/``."""
        with self._changed:
            self._awaited.discard(digest)
            self._changed.notify_all()

    def take(self, wanted: Iterable[str], idle: Callable[[], None]) -> Iterator[Content]:
        """Those of *wanted* that belong here, in that order, each when it is there; *idle* is called meanwhile."""
        for digest in wanted:
            if digest not in self._sizes:
                continue
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda digest=digest: digest not in self._awaited, _IDLE_S):  # type: ignore[misc]
                        break
                idle()
            name = digest.encode()
            yield Content(digest, self._sizes[digest], os.path.join(self._objects, name), os.path.join(self._cas, name))


class PeerServer:
    """Serves from *shelf* to those who have a token made with *secret*."""

    def __init__(self, shelf: Shelf, secret: str) -> None:
        self._shelf = shelf
        self._secret = secret
        self._used: set[str] = set()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._socket = _listen()
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="orc-peers", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="orc-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # A fetcher that goes away, or a stranger, is of no concern to anybody else.
            with connection, contextlib.suppress(OSError, WireError, ValueError, KeyError):
                connection.settimeout(_SILENCE_S)
                self._talk(_over(connection))
        finally:
            self._places.release()

    def _talk(self, channel: Channel) -> None:
        challenge = secrets.token_hex(16)
        channel.send("peer", challenge=challenge)
        asked = channel.receive()
        label, nonce = str(asked.head["label"]), str(asked.head["nonce"])
        token = token_for(self._secret, label)
        expected = _proof(token, "fetch", challenge, nonce)
        with self._lock:
            if not hmac.compare_digest(expected.encode(), str(asked.head["proof"]).encode()) or label in self._used:
                channel.send("refused")
                return
            self._used.add(label)
        channel.send("welcome", proof=_proof(token, "serve", challenge, nonce))
        wanted = [str(digest) for digest in json.loads(inflate(channel.receive().body))]
        contents = self._shelf.take(wanted, lambda: channel.send("wait"))
        send_contents(channel, contents, compress=False, sent=lambda _: None)


def fetch(
    addresses: Sequence[str],
    port: int,
    label: str,
    token: str,
    wanted: Sequence[str],
    take: Callable[[Channel], object],
) -> None:
    """Connect to a peer, ask for *wanted* and let *take* receive the stream. Raises `PeerError`."""
    connection, channel = _connect(addresses, port, label, token)
    with connection:
        try:
            channel.send("want", deflate(json.dumps(list(wanted)).encode()))
            take(channel)
        except WireError as error:
            raise PeerError(f"the peer stopped in the middle: {error}") from None


def _connect(addresses: Sequence[str], port: int, label: str, token: str) -> tuple[socket.socket, Channel]:
    """The first address at which somebody answers who knows the token."""
    problems = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as error:
            problems.append(f"{address} port {port}: {error.strerror or error}")
            continue
        connection.settimeout(_SILENCE_S)  # a host at work may take longer to answer than its kernel to connect
        try:
            channel = _over(connection)
            nonce = secrets.token_hex(16)
            challenge = str(_expect(channel, "peer").head.get("challenge", ""))
            channel.send("fetch", label=label, nonce=nonce, proof=_proof(token, "fetch", challenge, nonce))
            proof = str(_expect(channel, "welcome").head.get("proof", ""))
            if not hmac.compare_digest(proof.encode(), _proof(token, "serve", challenge, nonce).encode()):
                raise WireError("somebody else answers there")
        except (OSError, WireError) as error:
            connection.close()
            problems.append(f"{address} port {port}: {error}")
            continue
        except BaseException:
            connection.close()
            raise
        return connection, channel
    raise PeerError("; ".join(problems) or "the peer has no address")


def _expect(channel: Channel, op: str) -> Message:
    message = channel.receive()
    if message.op != op:
        raise WireError(f"answered {message.op!r}")
    return message


def _listen() -> socket.socket:
    """On a free port of all addresses, IPv6 ones included where there are any."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=64)


def own_addresses() -> list[str]:
    """Where peers may reach this host, the best guess first: the address that the laptop has reached, then those of
    the interfaces, then loopback (for hosts that are one machine)."""
    found = []
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        found.append(connection[2])
    found += _interface_addresses()
    outward = dict.fromkeys(address for address in found if not address.startswith("127."))
    return [*list(outward)[:4], "127.0.0.1"]


def _interface_addresses() -> list[str]:
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24]))  # SIOCGIFADDR
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            raw, _, _, scope = line.split()[:4]
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw)))
    return found
