"""Requests of somebody who means harm: the service refuses them, stays small, and goes on."""

from __future__ import annotations

import base64
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served import Served, make_served

MIB = 1 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = make_served(
        tmp_path_factory.mktemp("hostile") / "state",
        requests_per_minute=1_000_000,
        failed_logins_per_minute=1_000_000,
        body_timeout=2.0,
    )
    made.add_job("digits-aaaaaa")
    made.start()
    yield made
    made.kill()


def connection(served: Served) -> socket.socket:
    host, _, port = served.url.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)), timeout=60)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def head(served: Served, method: str, path: str, user: str | None, *headers: str) -> bytes:
    shown = [f"Authorization: Bearer {served.tokens[user]}"] if user else []
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *shown, "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


def answer(sock: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    pieces = []
    try:
        while piece := sock.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass  # it has closed while we were still sending
    return b"".join(pieces)


@pytest.mark.parametrize("path", ["/api/v1/login", "/api/v1/tokens", "/api/v1/bundles/missing", "/api/v1/nothing"])
@pytest.mark.parametrize("user", [None, "eve"])
def test_a_gigabyte_is_refused_before_it_is_read(served: Served, path: str, user: str | None) -> None:
    before = served.memory()
    with connection(served) as sock:
        sock.sendall(head(served, "POST", path, user, f"Content-Length: {1 << 30}"))
        status = sock.recv(64).split()[1]
    assert status in (b"413", b"401", b"403", b"404")
    assert served.memory() < before + 16 * MIB


@pytest.mark.parametrize("path", ["/api/v1/login", "/api/v1/bundles/missing"])
def test_a_body_without_a_length_is_cut_off_at_the_limit(served: Served, path: str) -> None:
    before = served.memory()
    piece = b"10000\r\n" + b"[" * 65536 + b"\r\n"
    with connection(served) as sock:
        sent = 0
        try:
            sock.sendall(head(served, "POST", path, None, "Transfer-Encoding: chunked"))
            while sent < 256 * MIB:
                sock.sendall(piece)
                sent += 65536
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 256 * MIB
    assert served.memory() < before + 32 * MIB


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(lambda served: b"", id="nothing at all"),
        pytest.param(lambda served: b"GET /api/v1/me HTTP/1.1\r\nX-A: ", id="half a head"),
        pytest.param(lambda served: head(served, "POST", "/api/v1/login", None, "Content-Length: 100"), id="no body"),
    ],
)
def test_who_says_nothing_more_is_not_waited_for(served: Served, begin: Any) -> None:
    with connection(served) as sock:
        sock.sendall(begin(served))
        began = time.monotonic()
        rest = answer(sock)
    assert time.monotonic() - began < 50
    assert not rest or rest.split()[1] == b"408"


def test_a_body_that_comes_byte_by_byte_is_given_up(served: Served) -> None:
    with connection(served) as sock:
        sock.sendall(head(served, "POST", "/api/v1/login", None, "Content-Length: 100000"))
        sock.settimeout(0.3)
        for _ in range(100):
            sock.sendall(b" ")
            try:
                status = sock.recv(64).split()[1]
                break
            except TimeoutError:
                continue
        else:
            raise AssertionError("it is still read")
    assert status == b"408"


def test_a_head_without_an_end_is_refused(served: Served) -> None:
    before = served.memory()
    with connection(served) as sock:
        sent = 0
        try:
            sock.sendall(b"GET /api/v1/me HTTP/1.1\r\nX-A: ")
            while sent < 64 * MIB:
                sock.sendall(b"a" * 65536)
                sent += 65536
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 64 * MIB
    assert served.memory() < before + 16 * MIB


BOMBS = {
    "deep": b"[" * MIB,
    "deep object": b'{"a":' * 100_000,
    "huge number": b'{"token": ' + b"9" * MIB + b"}",
    "exponent": b'{"token": 1e999999999}',
    "lone surrogate": b'{"token": "orc_\\ud800"}',
    "nul": b'{"token": "\\u0000"}',
    "no utf-8": b'{"token": "\xff\xfe"}',
    "aliases": b"a: &a [1,1]\nb: &b [*a,*a]\nc: [*b,*b]",
    "same key": b'{"token": "x", "token": ["x"]}',
    "nothing": b"",
    "null": b"null",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("path", ["/api/v1/login", "/api/v1/tokens"])
def test_a_body_that_is_no_request_is_refused_in_one_sentence(served: Served, bomb: str, path: str) -> None:
    with served.http("ada") as http:
        said = http.post(path, content=BOMBS[bomb], headers={"Content-Type": "application/json"})
    assert said.status_code in (400, 401, 422)
    assert set(said.json()["error"]) == {"what", "where", "hint"}
    assert len(said.text) < 2000


def cursor(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "text",
    [
        cursor("[" * 300),
        cursor("[" + "9" * 360 + ', "a"]'),
        cursor([1.0, "\ud800"]),
        cursor([1.0, "a\0"]),
        cursor([1.0, ["a"]]),
        cursor([1.0]),
        cursor({"a": 1}),
        cursor("[1e999, 1]"),
        "%00",
        "é",
        "' OR 1=1 --",
        "=" * 400,
    ],
)
def test_a_cursor_that_no_page_gave_is_refused(served: Served, text: str) -> None:
    with served.http() as http:
        said = http.get("/api/v1/jobs", params={"cursor": text})
    assert said.status_code == 400, said.text


PATHS = ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "a%0d%0aSet-Cookie:x", "%c0%ae", "'--", "${HOME}", "a" * 64]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(
    "route", ["jobs/{}", "jobs/{}/log", "jobs/{}/log/stream", "jobs/{}/log/search?q=a", "clusters/{}/queue"]
)
def test_a_name_that_leads_elsewhere_leads_nowhere(served: Served, route: str, name: str) -> None:
    """Sent as it is: a client of ours would tidy it up."""
    with connection(served) as sock:
        sock.sendall(head(served, "GET", "/api/v1/" + route.format(name), "eve", "Connection: close"))
        said = answer(sock)
    top, _, body = said.partition(b"\r\n\r\n")
    assert top.split()[1] in (b"400", b"404", b"422"), said
    assert b"set-cookie" not in top.lower()
    assert b"root:" not in body


@pytest.mark.parametrize(
    "query",
    [
        "rank=-1",
        "rank=../../x",
        "rank=0/../0",
        "node=1e9",
        "rank=1&node=1",
        f"offset={1 << 70}",
        "limit=0",
        "attempt=0",
    ],
)
def test_a_log_is_named_by_numbers_alone(served: Served, query: str) -> None:
    with served.http("eve") as http:
        assert http.get(f"/api/v1/jobs/digits-aaaaaa/log?{query}").status_code == 422


def test_a_header_of_an_answer_cannot_be_made_by_a_request(served: Served) -> None:
    with served.http("eve") as http:
        said = http.get("/api/v1/jobs", params={"q": "a\r\nX-Evil: 1", "name": "\r\n\r\n<script>"})
    assert said.status_code == 200
    assert "x-evil" not in said.headers
    assert said.headers["x-content-type-options"] == "nosniff"


def test_another_name_of_this_machine_is_refused(served: Served) -> None:
    """DNS rebinding: a page of another site whose name points here."""
    with served.http() as http:
        for name in ("evil.example", "localhost.evil.example", ""):
            assert http.get("/api/v1/me", headers={"Host": name}).status_code == 400, name
        assert http.get("/api/v1/me", headers={"Host": "localhost:1"}).status_code == 200


def test_scripts_in_names_come_back_as_data(served: Served) -> None:
    evil = "</script><script>alert(1)</script>\x1b[31m\u202e"
    served.add_job("evil-aaaaaa", name=evil, tags={"k": evil})
    with served.http("eve") as http:
        said = http.get("/api/v1/jobs/evil-aaaaaa")
    assert said.json()["name"] == evil
    assert said.headers["content-type"] == "application/json"
    assert "default-src 'none'" in said.headers["content-security-policy"]


def test_it_goes_on(served: Served) -> None:
    """After all of the above."""
    with served.http() as http:
        assert http.get("/readyz").json()["ready"]
        assert {job["id"] for job in http.get("/api/v1/jobs").json()["jobs"]} >= {"digits-aaaaaa"}
