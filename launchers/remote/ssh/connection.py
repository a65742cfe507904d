"""fabric connections with host keys that are verified, the user's keys and agent, and jump hosts as shared gateways."""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import fabric
import paramiko
from paramiko.auth_strategy import AuthStrategy
from paramiko.ssh_exception import IncompatiblePeer

from orc.launchers.errors import BackendUnreachable, HostAccessError, LinkLost
from orc.launchers.remote.ssh import known_hosts
from orc.launchers.remote.ssh.login import log_in
from orc.launchers.remote.ssh.routes import ConnectOptions, Route

_UNSENT = 1 << 17  # bytes that wait in the kernel: a sign of life must not queue behind megabytes on a slow line


class ServerBusy(LinkLost):
    """The host closed the connection before it sent anything."""


# Fabric's defaults, but that commands do not read from our own input; its files and the SSH configuration are not read.
_CONFIG = fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True, overrides={"run": {"in_stream": False}})


class HostConnection(fabric.Connection):  # type: ignore[misc]  # has no types
    """A fabric `Connection` that keeps to a `Route`. Threads may share it, and hosts behind it share it as gateway."""

    def __init__(
        self, route: Route, access: ConnectOptions, gateway: HostConnection | None, on_close: Callable[[], None]
    ) -> None:
        super().__init__(
            route.address,
            user=route.user,
            port=route.port,
            config=_CONFIG,
            gateway=gateway or route.proxy_command or False,
        )
        self._set(original_host=route.name, route=route, access=access, opening=threading.Lock(), on_close=on_close)
        self._set(failure=None, failed_at=0.0)

    def open(self) -> None:
        """Connect and log in, unless that is done. Raises `BackendUnreachable` (`HostAccessError`)."""
        asked = time.monotonic()
        with self.opening:
            if self.failed_at > asked:  # while we waited for the others: a jump host that is down is tried once for all
                raise type(self.failure)(self.failure.what, where=self.failure.where, hint=self.failure.hint)
            try:
                self._open_patiently()
            except BackendUnreachable as error:
                self._set(failure=error, failed_at=time.monotonic())
                raise

    def _open_patiently(self) -> None:
        deadline = time.monotonic() + self.access.connect_timeout_s
        while not self.is_connected:
            try:
                self._open()
            except ServerBusy:
                # Some sessions at a time must be enough for it (MaxStartups of sshd): others wait.
                pause = random.uniform(0.1, 0.6)  # noqa: S311 - nothing secret about it
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)

    def close(self) -> None:
        """Close the session, and those to jump hosts behind which there is none any more."""
        with suppress(EOFError, OSError):  # the way below it, through a jump host, has just broken off
            super().close()
        self.on_close()

    @property
    def is_used(self) -> bool:
        """Return whether there is a session, or one is being made."""
        return bool(self.is_connected or self.opening.locked())

    def _open(self) -> None:
        limit = self.access.connect_timeout_s
        self.client = paramiko.SSHClient()
        # It knows no host keys, so it asks this policy about each. fabric's own takes them all.
        self.client.set_missing_host_key_policy(_KnownHosts(self.route, self.access))
        way = self._reach()
        try:
            self.client.connect(
                self.host,
                self.port,
                sock=ActivitySocket(way),
                timeout=2 * limit,
                banner_timeout=limit,
                auth_timeout=limit,
                channel_timeout=limit,
                transport_factory=partial(_transport, self.route, limit),
                auth_strategy=_Keys(self.route),
            )
        except BaseException as error:
            transport = self.client.get_transport()
            failed = transport is not None and isinstance(error, (paramiko.SSHException, EOFError, OSError))
            problem = self._problem(error, transport, limit) if failed else None
            with suppress(EOFError, OSError):
                self.client.close()
            way.close()
            if problem:
                raise problem from error
            raise
        self.transport = self.client.get_transport()

    def _problem(self, error: BaseException, transport: paramiko.Transport, limit: float) -> BackendUnreachable:
        """Return what to raise for *error* of paramiko's."""
        where = self.route.where
        if isinstance(error, IncompatiblePeer):
            hint = "Is its OpenSSH older than 6.5? Then it needs an update."
            return HostAccessError(f"it speaks only what paramiko does not: {error}", where=where, hint=hint)
        if transport.remote_version and transport.is_active():
            return BackendUnreachable(f"it did not agree on keys within {2 * limit:g} s", where=where)
        if transport.remote_version:
            what = f"the connection was cut while it was made: {error or type(error).__name__}"
            return LinkLost(what, where=where)
        hint = "Its sshd hangs, is too busy, refuses this machine, or something else listens on that port."
        if self.route.proxy_command:
            hint = f"Does the ProxyCommand work? Try: {self.route.proxy_command}"
        if transport.is_active() or isinstance(error.__context__, TimeoutError):
            what = f"something answers, but no SSH server within {limit:g} s"
            return BackendUnreachable(what, where=where, hint=hint)
        return ServerBusy("it closes every new connection at once", where=where, hint=hint)

    def _reach(self) -> Any:
        """Return a connection to the host's SSH port."""
        if isinstance(self.gateway, HostConnection):
            return self._through(self.gateway)
        if self.gateway:
            return _proxied(self.gateway, self.route.where)
        return _dial(self.route, self.access.connect_timeout_s)

    def _through(self, gateway: HostConnection) -> Any:
        while True:
            fresh = not gateway.is_connected
            gateway.open()
            transport = gateway.transport
            try:
                return transport.open_channel(
                    "direct-tcpip", (self.host, self.port), ("127.0.0.1", 0), timeout=self.access.connect_timeout_s
                )
            except paramiko.ChannelException as error:
                raise BackendUnreachable(
                    f"{gateway.route.where} cannot reach it: {error.text or 'refused'}",
                    where=self.route.where,
                    hint=f"`ssh {gateway.route.name}` and try `nc -vz {self.host} {self.port}` there.",
                ) from error
            except (paramiko.SSHException, EOFError, OSError) as error:
                if _answers(transport, self.access.connect_timeout_s):
                    what = f"{gateway.route.where} gets no answer from it"
                    raise BackendUnreachable(what, where=self.route.where) from error
                with suppress(EOFError, OSError):  # it may have died while nobody used it; a new one tells
                    transport.close()
                if fresh:
                    what = f"{gateway.route.where}, on the way, went silent: {error}"
                    raise LinkLost(what, where=self.route.where) from error


def _answers(transport: Any, timeout_s: float) -> bool:
    """Return whether the SSH server behind *transport* still answers; other hosts may be reached through it."""
    try:
        transport.open_session(timeout=timeout_s).close()
    except paramiko.ChannelException:
        return True  # it refuses
    except (paramiko.SSHException, EOFError, OSError):
        return False
    return True


class ActivitySocket:
    """A socket, or a channel of a jump host, that notes when something came last."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.at = time.monotonic()

    def recv(self, size: int) -> bytes:
        """See `socket.socket.recv`."""
        data: bytes = self._connection.recv(size)
        self.at = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class _KnownHosts(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # has no types
    """Verification of a host key, as strict as the cluster's setting."""

    def __init__(self, route: Route, access: ConnectOptions) -> None:
        self._route, self._accept_new = route, access.host_keys == "accept-new"

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raise `HostAccessError` unless *key* is the host's."""
        known_hosts.check(self._route, key, accept_new=self._accept_new)


class _Keys(AuthStrategy):  # type: ignore[misc]  # has no types
    """Login with the keys of a route."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Log in. Raises `HostAccessError`, `LinkLost`."""
        log_in(transport, self._route)


def _transport(route: Route, limit: float, connection: Any, **options: Any) -> paramiko.Transport:
    """Return the session that is to be made over *connection*; it prefers host keys of a type in known_hosts."""
    transport = paramiko.Transport(connection, **options)
    _quiet()
    transport.handshake_timeout = limit
    known = known_hosts.key_types(known_hosts.entries(route.host_key_name, route.known_hosts))
    security = transport.get_security_options()
    offered = list(security.key_types)
    security.key_types = [kind for kind in known if kind in offered] + [kind for kind in offered if kind not in known]
    return transport


def _quiet() -> None:
    """Leave it to the errors that are raised to tell; paramiko would also print them with their tracebacks."""
    import logging

    log = logging.getLogger("paramiko")
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL + 1)


def _dial(route: Route, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection((route.address, route.port), timeout_s)
    except OSError as error:
        where = route.where
        what, hint = f"it cannot be reached: {error.strerror or error}", "Is it up, and is there a way to it?"
        if isinstance(error, socket.gaierror):
            where, what = route.name, f"there is no address for {route.address!r} ({error.strerror})"
            hint = "Set `address:` of the host in clusters.yaml, or HostName in ~/.ssh/config."
        elif isinstance(error, TimeoutError):
            what, hint = f"it did not answer within {timeout_s:g} s", "Is it up, and does the network let you through?"
        elif isinstance(error, ConnectionRefusedError):
            what, hint = "it refused the connection", "Is sshd running there, and on that port?"
        raise BackendUnreachable(what, where=where, hint=hint) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(AttributeError, OSError):  # Linux has it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    return connection


def _proxied(command: str, where: str) -> socket.socket:
    """Return a connection whose other end is the input and output of ProxyCommand."""
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],  # as ssh does it; the text is the user's own
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
    except OSError as error:
        raise BackendUnreachable(f"its ProxyCommand cannot be started: {error.strerror}", where=where) from error
    threading.Thread(target=process.wait, name="orc-proxy", daemon=True).start()  # it leaves no zombie
    return ours
