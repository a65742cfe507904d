"""`orc serve` as a process: where it may listen, TLS, its end, several on one ledger."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import TypeAdapter
from running_service import sse_events
from starlette.testclient import TestClient

from orc.launchers.errors import SpecError
from orc.orchestrator.cli.main import main
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.settings import Settings, load_settings


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """An `orc serve` on a free port; its URL and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "orc.orchestrator.cli.main", "serve", "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield json.loads(line)["url"], process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def make_token(capsys: pytest.CaptureFixture[str], user: str = "ada", role: str = "admin") -> str:
    assert main(["token", "create", "--user", user, "--role", role]) == 0
    return capsys.readouterr().out.strip()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_tokens_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_token(capsys).startswith("orc_")
    assert main(["token", "create", "--user", "eve", "--expires", "never", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["role"], made["expires_at"]) == ("user", None)
    assert main(["token", "revoke", made["id"]]) == 0
    assert main(["token", "list", "--json"]) == 0
    out = capsys.readouterr().out
    assert {t["user"]: bool(t["revoked_at"]) for t in json.loads(out.partition("\n")[2])["tokens"]} == {
        "ada": False,
        "eve": True,
    }
    assert main(["token", "revoke", "tok-none"]) == 2
    assert main(["token", "create", "--user", "a\nb"]) == 2
    for span in ("soon", "90", "0d"):
        assert main(["token", "create", "--user", "a", "--expires", span]) == 2


def test_an_admin_makes_tokens_through_the_service_and_others_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    admin, user = make_token(capsys), make_token(capsys, "grace", "user")
    with serving("--no-reconciler") as (url, _):
        monkeypatch.setenv("ORC_STATE_DIR", str(tmp_path / "elsewhere"))
        monkeypatch.setenv("ORC_SERVICE_URL", url)
        monkeypatch.setenv("ORC_TOKEN", admin)
        made = make_token(capsys, "linus", "viewer")
        assert httpx.get(f"{url}/api/v1/me", headers=bearer(made)).json()["user"] == "linus"
        assert main(["token", "list", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["tokens"]
        (token_id,) = [one["id"] for one in listed if one["user"] == "linus"]
        assert main(["token", "revoke", token_id]) == 0
        assert httpx.get(f"{url}/api/v1/me", headers=bearer(made)).status_code == 401
        assert main(["token", "list"]) == 0
        assert [line.split()[3] for line in capsys.readouterr().out.splitlines() if token_id in line][-1] == "revoked"
        monkeypatch.setenv("ORC_TOKEN", user)
        assert main(["token", "create", "--user", "grace", "--role", "admin"]) == 2
        assert "needs the role admin" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


def test_it_refuses_a_wider_address_without_a_token_and_without_encryption(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "0.0.0.0", "--behind-proxy"]) == 2
    assert "no token exists yet" in capsys.readouterr().err
    make_token(capsys)
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "in the clear" in capsys.readouterr().err
    assert main(["serve", "--host", "256.1.1.1", "--behind-proxy"]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_tls_by_itself_and_a_quiet_end(certificate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wide address with TLS; old protocols are refused; SIGTERM ends streams with a word and exits with 0."""
    token = make_token(capsys)
    options = ("--host", "0.0.0.0", "--tls-cert", str(certificate), "--tls-key", str(certificate), "--no-reconciler")
    with serving(*options) as (url, process):
        url = url.replace("0.0.0.0", "localhost")
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=trusting, headers=bearer(token), timeout=60) as http:
            old = ssl.create_default_context(cafile=str(certificate))
            old.set_ciphers("DEFAULT:@SECLEVEL=0")  # as far as the library itself still knows TLS 1.1
            with pytest.warns(DeprecationWarning, match="TLSv1"):
                old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/healthz", verify=old)
            answer = http.get(f"{url}/api/v1/me")
            assert answer.json()["user"] == "ada"
            assert "strict-transport-security" in answer.headers
            cookie = http.post(f"{url}/api/v1/login", json={"token": token}).headers["set-cookie"]
            assert "secure" in cookie.lower()
            with http.stream("GET", f"{url}/api/v1/events/stream") as stream:
                events = sse_events(stream.iter_lines())
                next(events)
                process.send_signal(signal.SIGTERM)
                assert [event.get("retry") for event in events] == [2000]
        log = process.communicate(timeout=60)[1]
        assert process.returncode == 0, log
        assert token not in log
        assert "GET /api/v1/me 200" in log


def test_a_request_that_is_under_way_is_finished_before_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    token = make_token(capsys)
    with serving() as (url, process):
        where = (httpx.URL(url).host, httpx.URL(url).port)
        body = json.dumps({"user": "linus", "role": "viewer"}).encode()
        with socket.create_connection(where, timeout=60) as connection:
            connection.sendall(
                f"POST /api/v1/tokens HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                "Expect: 100-continue\r\n\r\n".encode()
            )
            assert connection.recv(4096).startswith(b"HTTP/1.1 100")  # the route waits for the body
            process.send_signal(signal.SIGTERM)
            until = time.monotonic() + 60
            while True:  # until it takes no new connections
                assert time.monotonic() < until
                try:
                    socket.create_connection(where, timeout=60).close()
                except (ConnectionRefusedError, ConnectionResetError):
                    break
            connection.sendall(body)
            assert connection.recv(65536).startswith(b"HTTP/1.1 201")
        assert process.wait(60) == 0
    assert main(["token", "list"]) == 0
    assert "linus" in capsys.readouterr().out


def test_the_access_log_has_one_object_on_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    token = make_token(capsys)
    with serving("--no-reconciler", "--access-log", "json") as (url, process):
        httpx.get(f"{url}/api/v1/me?token=of-nobody", headers=bearer(token)).raise_for_status()
        httpx.get(f"{url}/api/v1/jobs/%0a%7b%22user%22:%22x%22%7d")
        process.send_signal(signal.SIGTERM)
        log = process.communicate()[1]
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert [(line["path"], line["status"], line.get("user")) for line in lines] == [
        ("/api/v1/me", 200, "ada"),
        ('/api/v1/jobs/\n{"user":"x"}', 401, None),
    ]
    assert {"at", "address", "method", "ms"} < lines[1].keys()
    assert "of-nobody" not in log


def test_a_certificate_that_cannot_be_used_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    assert main(["serve", "--tls-cert", str(bad), "--tls-key", str(bad)]) == 2
    assert "certificate cannot be used" in capsys.readouterr().err
    assert main(["serve", "--tls-cert", str(bad)]) == 2


@pytest.mark.parametrize("ledger", ["sqlite", "postgres"])
def test_two_services_on_one_ledger(
    ledger: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that one revokes does not open the other; a stream goes on at the other where it was cut off."""
    if ledger == "postgres":
        monkeypatch.setenv("ORC_LEDGER_URL", request.getfixturevalue("postgres_url"))
    token, spare = make_token(capsys), make_token(capsys, "grace", "user")
    with serving() as (one, _), serving() as (two, _):
        with Client(reconciler=False) as client:
            for number in range(3):
                new = NewJob(
                    f"digits-{number:06}", "digits", "local", "local", "", {"grace": 1.0}, {"code": "0" * 64}, {}
                )
                with client.workspace.ledger.transaction() as tx:
                    tx.enqueue(new, "there is no room", owner="test", claim_expires_at=tx.now + 3600)
        with httpx.Client(headers=bearer(token), timeout=60) as http:
            assert http.get(f"{two}/api/v1/jobs").json() == http.get(f"{one}/api/v1/jobs").json()
            seen: list[int] = []
            for url in (one, two, one):
                with http.stream("GET", f"{url}/api/v1/events/stream", params={"after": seen[-1] if seen else 0}) as s:
                    seen.append(next(event["id"] for event in sse_events(s.iter_lines()) if "data" in event))
            assert seen == sorted(set(seen))
            assert httpx.get(f"{two}/api/v1/me", headers=bearer(spare)).status_code == 200
            listed = http.get(f"{one}/api/v1/tokens").json()["tokens"]
            (spare_id,) = [one["id"] for one in listed if one["user"] == "grace"]
            assert http.delete(f"{one}/api/v1/tokens/{spare_id}").status_code == 200
            assert httpx.get(f"{two}/api/v1/me", headers=bearer(spare)).status_code == 401
            metrics = http.get(f"{two}/metrics").text
            assert 'orc_jobs{state="SUCCEEDED"} 0.0' in metrics
            assert 'route="/api/v1/jobs",status="200"' in metrics
            assert http.get(f"{one}/readyz").json() == {"ready": True, "ledger": "ok", "driver": "ok"}


def test_settings_come_from_flags_before_variables_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("port: 1\nthreads: 3\nallowed_hosts: [a]\nhost: '::1'\n")
    environ = {"ORC_SERVE_PORT": "2", "ORC_SERVE_THREADS": "4", "ORC_SERVE_ALLOWED_HOSTS": "b, c", "ORC_STATE_DIR": ""}
    settings = load_settings({"port": 3, "host": None}, file, environ)
    assert (settings.port, settings.threads, settings.allowed_hosts, settings.host) == (3, 4, ("b", "c"), "::1")
    assert settings.is_loopback


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        ("prot: 1", {}, "did you mean port"),
        ("threads: 2\nport: many", {}, "service.yaml:2:1"),
        ("- port", {}, "expected a mapping"),
        ("port: [", {}, "service.yaml:2:1"),
        ("tls_cert: on", {}, "belong together"),  # a text, by YAML 1.2
        ("port: 1\nport: 2", {}, "duplicate key"),
        ("", {"ORC_SERVE_PORTS": "1"}, "ORC_SERVE_PORTS"),
        ("", {"ORC_SERVE_THREADS": "0"}, "ORC_SERVE_THREADS"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, environ: dict[str, str], said: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_settings({}, file, environ)
    assert said in str(caught.value)


def test_without_the_extra_one_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "orc.orchestrator.service.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 2
    assert "orc-launch[service]" in capsys.readouterr().err


def test_the_first_request_waits_for_nothing_that_is_made_ready_at_the_start(tmp_path, monkeypatch):
    app = create_app(Settings(reconciler=False), open_client=lambda: Client(tmp_path / "state", reconciler=False))
    with TestClient(app, base_url="http://127.0.0.1") as http:
        make, made = TypeAdapter.__init__, []
        monkeypatch.setattr(TypeAdapter, "__init__", lambda self, *a, **k: made.append(a) or make(self, *a, **k))
        assert http.get("/healthz").status_code == 200
    assert made == []
