"""Servers that notifications reach: a real one of HTTP, one of SMTP, and certificates that both are trusted by."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from orc.orchestrator.notifications.targets import Settings, load_settings


@dataclass
class Received:
    """What a server got, and what it answers: the answers in order, the last one for ever."""

    url: str = ""
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answers: list[int] = field(default_factory=lambda: [200])
    hold: Callable[[], object] = lambda: None  # called before an answer

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.requests]


def _serve(context: ssl.SSLContext | None = None) -> tuple[ThreadingHTTPServer, Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
            received.hold()
            status = received.answers.pop(0) if len(received.answers) > 1 else received.answers[0]
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", received.url)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    received.url = f"http{'s' if context else ''}://localhost:{server.server_port}/hook"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server, received


@pytest.fixture
def web() -> Iterator[Received]:
    server, received = _serve()
    yield received
    server.shutdown()
    server.server_close()


@pytest.fixture
def server_context(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Of a server with `certificate`, which this process trusts for now."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def secure_web(server_context: ssl.SSLContext) -> Iterator[Received]:
    server, received = _serve(server_context)
    yield received
    server.shutdown()
    server.server_close()


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Settings with these sections."""
    return lambda **sections: Settings.model_validate(sections)


@pytest.fixture
def write_settings(orc_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Write settings with these sections where commands look for them."""

    def write(**sections: Any) -> Settings:
        path = tmp_path / "notifications.yaml"
        path.write_text(yaml.safe_dump(sections))
        monkeypatch.setenv("ORC_NOTIFICATIONS", str(path))
        return load_settings()

    return write
