"""Connections: made through jump hosts and proxies, checked, logged in. Jump hosts are shared by those behind them."""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import BackendUnreachable, SpecError
from orc.launchers.remote.ssh import known_hosts
from orc.launchers.remote.ssh.config import Config, Route, read_config, resolve
from orc.launchers.remote.ssh.errors import AccessRefused, LinkLost
from orc.launchers.remote.ssh.hosts import Access, HostSpec
from orc.launchers.remote.ssh.login import log_in

if TYPE_CHECKING:
    from paramiko import Transport

_DEEPEST = 8  # jump hosts in a row
_FRESH_S = 5.0


class Busy(LinkLost):
    """The host closed the connection before it said anything."""


class Links:
    """How to reach the hosts of one cluster; holds the connections to jump hosts."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._lock = threading.Lock()
        self._jumps: dict[Route, Jump] = {}

    @cached_property
    def _config(self) -> Config:
        return read_config(self.access.config_files())

    def route(self, spec: HostSpec) -> Route:
        """Raises `SpecError`."""
        with self._lock:
            config = self._config
        return resolve(spec, config)

    def connect(self, spec: HostSpec) -> Transport:
        """A new connection, checked and logged in. Raises `BackendUnreachable` (`AccessRefused`), `SpecError`."""
        route = self.route(spec)
        self._refuse_circle(route)
        return self._connect(route)

    def close_unused(self) -> None:
        """Close the connections to jump hosts behind which there is no connection any more."""
        with self._lock:
            jumps = list(self._jumps.values())
        while sum(jump.close_unused() for jump in jumps):  # one may have been the last behind another
            continue

    def _connect(self, route: Route) -> Transport:
        deadline = time.monotonic() + self.access.connect_timeout_s
        while True:
            try:
                return _enter(route, self.access, self._socket(route))
            except Busy:
                # Some sessions at a time must be enough for it (MaxStartups of sshd): others wait for their turn.
                pause = random.uniform(0.1, 0.6)  # noqa: S311 - nothing secret about it
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)

    def _socket(self, route: Route) -> Any:
        """A connection to the host's SSH port."""
        if route.proxy_command:
            return _proxied(route)
        if not route.jumps:
            return _dial(route, self.access.connect_timeout_s)
        before = self._before(route)
        with self._lock:
            jump = self._jumps.setdefault(before, Jump(before, self._connect))
        return jump.channel(route, self.access.connect_timeout_s)

    def _before(self, route: Route) -> Route:
        """The route to the last jump host on the way to *route*."""
        *others, last = route.jumps
        jump = self.route(last)
        return replace(jump, jumps=tuple(others), proxy_command=None) if others else jump

    def _refuse_circle(self, route: Route) -> None:
        names = [route.name]
        while route.jumps:
            route = self._before(route)
            names.append(route.name)
            if route.name in names[:-1] or len(names) > _DEEPEST:
                raise SpecError(
                    f"jump hosts lead in a circle: {' -> '.join(names)}",
                    hint="Look for ProxyJump in ~/.ssh/config, and set `ProxyJump none` for the jump host itself.",
                )


class Jump:
    """A connection to a jump host, made when needed, for any number of hosts behind it."""

    def __init__(self, route: Route, connect: Callable[[Route], Transport]) -> None:
        self._route = route
        self._connect = connect
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._made = 0.0
        self._opening = 0
        self._channels: list[Any] = []

    def channel(self, route: Route, timeout_s: float) -> Any:
        """A connection from the jump host to the host behind it. Raises `BackendUnreachable`."""
        with self._lock:
            self._opening += 1
        try:
            channel = self._channel(route, timeout_s)
            with self._lock:
                self._channels = [*(c for c in self._channels if not c.closed), channel]
            return channel
        finally:
            with self._lock:
                self._opening -= 1

    def close_unused(self) -> bool:
        """Close it if it is open and nobody uses it; whether that was so."""
        with self._lock:
            if self._transport is None or self._opening or any(not c.closed for c in self._channels):
                return False
            transport, self._transport = self._transport, None
        shut(transport)
        return True

    def _channel(self, route: Route, timeout_s: float) -> Any:
        from paramiko import ChannelException, SSHException

        while True:
            transport, made = self._open()
            try:
                return transport.open_channel(
                    "direct-tcpip", (route.address, route.port), ("127.0.0.1", 0), timeout=timeout_s
                )
            except ChannelException as error:
                raise BackendUnreachable(
                    f"{self._route.where} cannot reach it: {error.text or 'refused'}",
                    where=route.where,
                    hint=f"`ssh {self._route.name}` and try `nc -vz {route.address} {route.port}` there.",
                ) from error
            except (SSHException, EOFError, OSError) as error:
                # The connection may have died while nobody used it; a new one tells.
                self._drop(transport)
                if made:
                    raise LinkLost(
                        f"{self._route.where}, on the way, went silent: {error}", where=route.where
                    ) from error

    def _open(self) -> tuple[Transport, bool]:
        """The connection, and whether it was made just now."""
        with self._lock:
            if self._transport is not None and self._transport.is_active():
                return self._transport, time.monotonic() - self._made < _FRESH_S
            self._transport = self._connect(self._route)
            self._made = time.monotonic()
            return self._transport, True

    def _drop(self, transport: Transport) -> None:
        with self._lock:
            if self._transport is transport:
                self._transport = None
        shut(transport)


def shut(transport: Transport) -> None:
    """Close a session. paramiko raises when the way below it, through a jump host, has just broken off."""
    with suppress(EOFError, OSError):
        transport.close()


def _dial(route: Route, timeout_s: float) -> socket.socket:
    addresses = _addresses(route, timeout_s)
    failures: list[OSError] = []
    for family, kind, protocol, _, address in addresses:
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(timeout_s / len(addresses))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(address)
        except OSError as error:
            connection.close()
            failures.append(error)
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    first = failures[0]
    if isinstance(first, TimeoutError):
        what, hint = f"it did not answer within {timeout_s:g} s", "Is it up, and does the network let you through?"
    elif isinstance(first, ConnectionRefusedError):
        what, hint = "it refused the connection", "Is sshd running there, and on that port?"
    else:
        what, hint = f"it cannot be reached: {first.strerror or first}", "Is it up, and is there a way to it?"
    raise BackendUnreachable(what, where=route.where, hint=hint) from first


def _addresses(route: Route, timeout_s: float) -> list[Any]:
    """What `socket.getaddrinfo` finds behind the name. The search has no time limit that one could set."""
    found: list[Any] = []
    failures: list[OSError] = []

    def search() -> None:
        try:
            found.extend(socket.getaddrinfo(route.address, route.port, type=socket.SOCK_STREAM))
        except OSError as error:
            failures.append(error)

    searching = threading.Thread(target=search, name="orc-address", daemon=True)
    searching.start()
    searching.join(timeout_s)
    if found:
        return found
    why = failures[0].strerror if failures else f"no answer within {timeout_s:g} s"
    raise BackendUnreachable(
        f"there is no address for {route.address!r} ({why})",
        where=route.name,
        hint="Set `address:` of the host in clusters.yaml, or HostName in ~/.ssh/config.",
    )


def _proxied(route: Route) -> socket.socket:
    """A connection whose other end is the input and output of ProxyCommand."""
    assert route.proxy_command is not None
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {route.proxy_command}"],  # as ssh does it; the text is the user's own
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
    threading.Thread(target=process.wait, name="orc-proxy", daemon=True).start()  # it leaves no zombie
    return ours


def _enter(route: Route, access: Access, connection: Any) -> Transport:
    """Turn a connection to an SSH port into a session: its host key checked, the user logged in."""
    from paramiko import SSHException, Transport

    limit = access.connect_timeout_s
    try:
        transport = Transport(connection)
    except BaseException:
        connection.close()
        raise
    _quiet()
    try:
        transport.banner_timeout = limit
        transport.handshake_timeout = limit
        transport.auth_timeout = limit
        transport.channel_timeout = limit
        transport.daemon = True
        known = known_hosts.key_types(known_hosts.entries(route.host_key_name, route.known_hosts))
        options = transport.get_security_options()
        offered = list(options.key_types)
        options.key_types = [kind for kind in known if kind in offered] + [k for k in offered if k not in known]
        try:
            transport.start_client(timeout=2 * limit)
        except (SSHException, EOFError, OSError) as error:
            raise _no_session(route, error, limit, heard=bool(transport.remote_version)) from error
        if not transport.initial_kex_done:
            if not transport.remote_version:
                raise _no_server(route, limit)
            raise BackendUnreachable(f"it did not agree on keys within {2 * limit:g} s", where=route.where)
        known_hosts.check(route, transport.get_remote_server_key(), accept_new=access.host_keys == "accept-new")
        log_in(transport, route)
    except BaseException:
        shut(transport)
        raise
    return transport


def _quiet() -> None:
    """What goes wrong is raised here; paramiko would also print it with its traceback."""
    import logging

    log = logging.getLogger("paramiko")
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL + 1)


def _no_session(route: Route, error: BaseException, limit: float, *, heard: bool) -> BackendUnreachable:
    from paramiko.ssh_exception import IncompatiblePeer

    if isinstance(error, IncompatiblePeer):
        return AccessRefused(
            f"it speaks only what paramiko does not: {error}",
            where=route.where,
            hint="Is its OpenSSH older than 6.5? Then it needs an update.",
        )
    if heard:
        return LinkLost(f"the connection was cut while it was made: {error or type(error).__name__}", where=route.where)
    if isinstance(error.__context__, TimeoutError):
        return _no_server(route, limit)
    return Busy("it closes every new connection at once", where=route.where, hint=_no_server_hint(route))


def _no_server(route: Route, limit: float) -> BackendUnreachable:
    what = f"something answers, but no SSH server within {limit:g} s"
    return BackendUnreachable(what, where=route.where, hint=_no_server_hint(route))


def _no_server_hint(route: Route) -> str:
    if route.proxy_command:
        return f"Does the ProxyCommand work? Try: {route.proxy_command}"
    return "Its sshd hangs, is too busy, refuses this machine, or something else listens on that port."
