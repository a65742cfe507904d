"""The connections to the hosts of one cluster. Those behind a jump host share the one to it."""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendUnreachable, SpecError
from orc.launchers.remote.ssh.config import Config, Route, read_config, resolve
from orc.launchers.remote.ssh.hosts import ConnectOptions, HostSpec

if TYPE_CHECKING:
    from orc.launchers.remote.ssh.connection import HostConnection

_DEEPEST = 8  # jump hosts in a row


def check_fabric() -> None:
    """Raise `BackendUnreachable` where fabric is not installed: another process may have it, so jobs can wait."""
    if importlib.util.find_spec("fabric") is None:
        what = "connections over SSH need fabric, which is not installed here"
        raise BackendUnreachable(what, hint="pip install 'orc-launch[ssh]'")


class ConnectionPool:
    """Makes the connections of one cluster, whose jump hosts it closes when nothing is behind them any more.

    Raises `BackendUnreachable` where fabric is not installed.
    """

    def __init__(self, access: ConnectOptions) -> None:
        check_fabric()
        self.access = access
        self._lock = threading.RLock()
        self._gateways: dict[Route, HostConnection] = {}
        self._connections: list[HostConnection] = []

    def connection(self, spec: HostSpec) -> HostConnection:
        """Return a connection to a host, which is not open yet. Raises `SpecError`."""
        with self._lock:
            route = resolve(spec, self._config)
            self._refuse_circle(route)
            return self._connection(route)

    def close_unused(self) -> None:
        """Close the connections to jump hosts behind which there is none."""
        with self._lock:
            unused = [
                gateway
                for gateway in self._gateways.values()
                if gateway.is_connected and not any(c.gateway is gateway and c.is_used for c in self._connections)
            ]
        for gateway in unused:
            gateway.close()  # and with it one that only leads to it

    @cached_property
    def _config(self) -> Config:
        return read_config(self.access.config_files())

    def _connection(self, route: Route) -> HostConnection:
        from orc.launchers.remote.ssh.connection import HostConnection

        gateway = self._gateway(self._before(route)) if route.jumps else None
        connection = HostConnection(route, self.access, gateway, self.close_unused)
        self._connections.append(connection)
        return connection

    def _gateway(self, route: Route) -> HostConnection:
        if route not in self._gateways:
            self._gateways[route] = self._connection(route)
        return self._gateways[route]

    def _before(self, route: Route) -> Route:
        """Return the route to the last jump host on the way to *route*."""
        *others, last = route.jumps
        jump = resolve(last, self._config)
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
