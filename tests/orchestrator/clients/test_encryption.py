"""The way to a service: what cannot go encrypted to the right one does not go, and connections stay open."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from served_ledger import Served

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import Digests
from orc.orchestrator.api.jobs import submit_job
from orc.orchestrator.cli.main import main
from orc.orchestrator.clients.errors import ServiceUnreachable
from orc.orchestrator.clients.http_session import _MOST_IDLE, Connections, Request
from orc.orchestrator.clients.logins import Login
from orc.orchestrator.clients.service import ServiceClient
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.server import make_server
from orc.orchestrator.service.settings import Settings


@pytest.fixture(scope="module")
def encrypted(served: Served, certificate: Path) -> Iterator[tuple[str, Path]]:
    """A service with a certificate of its own over the same ledger: its URL, and the certificate."""
    settings = Settings(port=0, reconciler=False, tls_cert=certificate, tls_key=certificate)
    server = make_server(settings, create_app(settings, open_client=served.ledger))
    listening = socket.create_server(("127.0.0.1", 0))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    serving.start()
    while not server.started:
        assert serving.is_alive()
        time.sleep(0.01)
    yield f"https://127.0.0.1:{listening.getsockname()[1]}", certificate
    server.should_exit = True
    serving.join()


def test_a_certificate_is_verified(encrypted: tuple[str, Path], served: Served, tmp_path: Path, capfd) -> None:
    url, certificate = encrypted
    with (
        ServiceClient(url, served.tokens["grace"], sleep=lambda _: None) as client,
        pytest.raises(ServiceUnreachable, match="certificate is not trusted") as refused,
    ):
        client.me()
    assert "--ca" in refused.value.hint
    token = tmp_path / "token"
    token.write_text(served.tokens["grace"])
    token.chmod(0o600)
    assert main(["login", url, "--token-file", str(token), "--ca", str(certificate)]) == 0
    capfd.readouterr()
    assert main(["whoami"]) == 0
    assert capfd.readouterr().out == f"grace (user) at {url}\n"


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers each connection in the same way: its address, and what it was sent."""
    heard: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            heard.append(self.request.recv(65536))
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"127.0.0.1:{server.server_address[1]}", heard
        server.shutdown()
        serving.join()


def test_secrets_never_travel_in_the_clear_whatever_was_agreed_for_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with ServiceClient("http://192.0.2.1", "orc_x", insecure_http=True) as client:
        monkeypatch.setattr(client.session.connections, "exchange", lambda _: pytest.fail("it was sent"))
        with pytest.raises(LaunchError, match="secrets would travel unencrypted") as refused:
            submit_job(client.session, {}, Digests(""), "", {"API_KEY": "hunter2"}, "a-key-of-its-own")
    assert "hunter2" not in str(refused.value)


def test_a_redirection_is_not_followed() -> None:
    with answering(b"HTTP/1.1 307 Away\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n") as (address, heard):
        with (
            ServiceClient(f"http://{address}", "orc_x") as client,
            pytest.raises(ServiceUnreachable, match="not that of a service"),
        ):
            client.me()
        assert len(heard) == 1


def test_a_proxy_gets_the_requests_to_other_machines_and_never_the_token_of_an_encrypted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with answering(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n") as (address, heard):
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://me:secret@{address}")
        monkeypatch.setenv("no_proxy", "here.example.org")
        for url, line in (
            ("https://orc.example.org", b"CONNECT orc.example.org:443 HTTP/1."),
            ("http://orc.example.org/team", b"GET http://orc.example.org/team/api/v1/me HTTP/1.1"),
            ("http://127.0.0.1:1", None),
            ("http://here.example.org:1", None),
        ):
            heard.clear()
            with (
                ServiceClient(url, "orc_x", insecure_http=True, sleep=lambda _: None) as client,
                pytest.raises(LaunchError),
            ):
                client.me()
            assert bool(heard) == (line is not None)
            for request in heard if line else ():
                assert request.startswith(line)
                assert b"Proxy-Authorization: Basic bWU6c2VjcmV0" in request
                assert (b"orc_x" in request) == url.startswith("http://")


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
