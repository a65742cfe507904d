"""Connections to a service that stay open between requests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from orc.orchestrator.clients.http_session import _MOST_IDLE, Connections, Request
from orc.orchestrator.clients.logins import Login

AT_ONCE = _MOST_IDLE + 5


class Server(ThreadingHTTPServer):
    """A service that answers once *together* requests are there, and knows its connections."""

    daemon_threads = True
    together = threading.Barrier(1)

    def __init__(self) -> None:
        self.open: list[socket.socket] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.open.append(self.connection)

    def do_GET(self) -> None:
        self.server.together.wait(60)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_few_connections_stay_and_those_that_the_service_has_ended_are_not_used(server: Server) -> None:
    connections = Connections(Login(f"http://127.0.0.1:{server.server_port}", ""))
    request = Request("GET", "/", lambda reply: reply.json)
    server.together = threading.Barrier(AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda _: connections.exchange(request).status, range(AT_ONCE)))
    assert answers == [200] * AT_ONCE
    assert len(connections._idle) == _MOST_IDLE
    for each in server.open:
        with contextlib.suppress(OSError):  # those that the client has closed
            each.shutdown(socket.SHUT_RDWR)
    server.together = threading.Barrier(1)
    assert connections.exchange(request).status == 200
    assert len(server.open) == AT_ONCE + 1
    connections.close()
