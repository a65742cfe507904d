"""The server: one uvicorn process with the application and, by default, the threads of the reconciler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from orc.launchers.errors import LaunchError
from orc.orchestrator.api import access
from orc.orchestrator.client import Client
from orc.orchestrator.engine.passes import STOP_S, ReconcilerThreads
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.notifications.delivery import Deliverer
from orc.orchestrator.notifications.targets import Policy
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.context import Service
from orc.orchestrator.service.housekeeping import Housekeeper
from orc.orchestrator.service.settings import Settings

logger = logging.getLogger("orc.service")
_CONNECTIONS = 2000  # more are refused with 503
_LARGEST_HEAD = 64 << 10


def check(settings: Settings, client: Client, now: float) -> None:
    """Raise `LaunchError` for settings under which others could read or do what they may not.

    Every request needs a token wherever the service listens. Beyond this machine there must be one, and what travels
    must be encrypted, here or by a proxy.
    """
    if settings.is_loopback:
        return
    if not access.any_valid(client.workspace.ledger, now):
        raise LaunchError(
            f"{settings.host} can be reached by other machines, and no token exists yet",
            where="--host",
            hint="make one first: orc token create --user NAME --role admin",
        )
    if not settings.https:
        raise LaunchError(
            f"{settings.host} can be reached by other machines, and tokens would travel in the clear",
            where="--host",
            hint="give --tls-cert and --tls-key, or --behind-proxy where a proxy encrypts",
        )


class PromptConnection(H11Protocol):
    """Connection that is closed where the head of a request does not come to its end.

    uvicorn waits for it without limit, and serves a number of connections only: whoever opens that many and says
    nothing would keep everybody else out. The pure Python parser is used, because the other one has no largest head.
    """

    def __init__(self, *, head_timeout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._head_timeout_s = head_timeout_s
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; what is only the begin of a head has to go on."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._head_timeout_s, self._close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _close(self) -> None:
        self._patience = None
        if not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """Uvicorn server that ends the streams of the service first when it stops, and lets its caller go on."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGTERM and SIGINT. uvicorn would send them again at the end, before the reconciler has stopped."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Let streams end with a word when to come again, and requests finish."""
        app: Any = self.config.app
        app.state.service.stopping.set()
        await super().shutdown(sockets)


def make_server(settings: Settings, app: FastAPI) -> Server:
    """Return a server for *app*. Raises `LaunchError` for a certificate that cannot be used."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,  # the gate writes one without queries and with users
        server_header=False,
        proxy_headers=settings.behind_proxy,
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_keep_alive=15,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout)),
        limit_concurrency=_CONNECTIONS,
        http=cast(type[asyncio.Protocol], partial(PromptConnection, head_timeout_s=settings.body_timeout)),
        h11_max_incomplete_event_size=_LARGEST_HEAD,
        ws="none",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise LaunchError(
            f"the certificate cannot be used: {error}", where=f"{settings.tls_cert}, {settings.tls_key}"
        ) from None
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    return Server(config)


def serve(settings: Settings, open_client: Callable[[], Client], on_listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: Settings of the service.
        open_client: Opens a client of the ledger.
        on_listening: Called with the URL once connections are taken.

    Raises:
        LaunchError: It may not, or cannot, listen there.
    """
    with open_client() as client:
        check(settings, client, client.workspace.clock())
    app = create_app(settings, open_client=open_client)
    server = make_server(settings, app)
    service: Service = app.state.service
    stop = threading.Event()
    deliverer = _deliverer(open_client) if settings.reconciler else nullcontext()
    housekeeper = Housekeeper(open_client, settings, service.changes)  # in every service: a lease lets one of them work
    reconciler = _start_reconciler(service, open_client, stop) if settings.reconciler else None
    try:
        with deliverer, housekeeper:
            asyncio.run(run_server(server, settings, on_listening))
    finally:
        stop.set()
        if reconciler is not None:
            reconciler.join(STOP_S + 5.0)


async def run_server(server: Server, settings: Settings, on_listening: Callable[[str], None]) -> None:
    """Serve until *server* is set to exit; *on_listening* gets the URL. Raises `LaunchError`."""
    sockets = _bind(settings)
    scheme = "https" if settings.tls else "http"
    host, port = sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    task = asyncio.create_task(server.serve(sockets=sockets))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    if server.started:
        on_listening(f"{scheme}://{shown}:{port}")
    await task


def _bind(settings: Settings) -> list[socket.socket]:
    """Return the socket to listen on. Raises `LaunchError`."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise LaunchError(
            f"cannot listen there: {error.strerror or error}", where=where, hint="another --port, or 0 for a free one"
        ) from None
    return [bound]


def _deliverer(open_client: Callable[[], Client]) -> Deliverer:
    """Return the thread that delivers notifications, beside the passes: a target never keeps them waiting."""

    def open_ledger() -> Ledger:
        return open_client().workspace.ledger

    return Deliverer(open_ledger, policy=Policy(service=True), report_line=logger.warning)


def _start_reconciler(service: Service, open_client: Callable[[], Client], stop: threading.Event) -> threading.Thread:
    """Return the thread that runs the passes."""
    threads = ReconcilerThreads(lambda: open_client().session)
    service.reconciler_status = lambda: threads.status
    thread = threading.Thread(target=threads.run, args=(stop,), name="orc-reconciler", daemon=True)
    thread.start()
    return thread
