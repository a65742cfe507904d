"""What is too much is refused before it costs anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_service import Running, make_running


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = make_running(
        tmp_path_factory.mktemp("strict") / "state",
        max_body=4096,
        requests_per_minute=40,
        failed_logins_per_minute=3,
        max_streams=1,
    ).start()
    yield made
    made.stop()


def _address(running: Running, number: int) -> Any:
    """A client that comes from another address of this machine, so that tests do not share rates."""
    transport = httpx.HTTPTransport(local_address=f"127.0.0.{number}")
    return running.http("ada", transport=transport)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_is_as_large_as_was_set_and_no_larger(strict: Running, streamed: bool) -> None:
    with _address(strict, 15) as http:
        for size, status in ((4096, 422), (4097, 413)):
            body = b" " * size
            answer = http.post("/api/v1/login", content=iter([body]) if streamed else body)
            assert answer.status_code == status, answer.text
    assert answer.json()["error"]["what"] == "the body is larger than 4096 bytes"


def test_a_token_has_to_wait_when_it_asks_too_often(strict: Running) -> None:
    with _address(strict, 20) as http:
        answers = [http.get("/api/v1/me") for _ in range(41)]
    assert {answer.status_code for answer in answers[:20]} == {200}
    assert answers[-1].status_code == 429
    assert 0 < int(answers[-1].headers["retry-after"]) <= 60
    assert answers[-1].json()["error"]["what"] == "too many requests"


def test_a_flood_without_a_token_does_not_lock_out_others_at_its_address(strict: Running) -> None:
    with _address(strict, 25) as http:
        anonymous = [http.get("/healthz", headers={"Authorization": ""}).status_code for _ in range(41)]
        assert (anonymous[0], anonymous[-1]) == (200, 429)
        right = {"Authorization": f"Bearer {strict.tokens['eve']}"}
        assert http.get("/api/v1/me", headers=right).status_code == 200


def test_an_address_that_guesses_tokens_has_to_wait_and_a_valid_token_does_not(strict: Running) -> None:
    with _address(strict, 30) as http:
        wrong = {"Authorization": "Bearer orc_guessed"}
        assert [http.get("/api/v1/me", headers=wrong).status_code for _ in range(4)] == [401, 401, 401, 429]
        right = {"Authorization": f"Bearer {strict.tokens['eve']}"}
        assert http.get("/api/v1/me", headers=right).status_code == 200
        assert http.post("/api/v1/login", json={"token": strict.tokens["eve"]}).status_code == 200
        assert http.get("/api/v1/me", headers=wrong).status_code == 429  # a valid one does not begin the count anew


def test_an_address_that_a_client_invents_is_not_believed(strict: Running) -> None:
    with _address(strict, 35) as http:
        guess = {"Authorization": "Bearer orc_guessed"}
        told = [
            http.get("/api/v1/me", headers={**guess, "X-Forwarded-For": f"10.0.0.{n}"}).status_code for n in range(4)
        ]
    assert told == [401, 401, 401, 429]


@pytest.mark.parametrize(("trusted", "told"), [({"trusted_proxies": ("10.9.9.9",)}, [401, 429]), ({}, [401, 401])])
def test_a_proxy_names_the_address_if_it_is_trusted(
    tmp_path: Path, trusted: dict[str, tuple[str, ...]], told: list[int]
) -> None:
    made = make_running(tmp_path / "state", behind_proxy=True, failed_logins_per_minute=1, **trusted).start()
    guess = {"Authorization": "Bearer orc_guessed"}
    try:
        with made.http() as http:
            asked = [{**guess, "X-Forwarded-For": f"10.0.0.{n}"} for n in (1, 2)]
            assert [http.get("/api/v1/me", headers=headers).status_code for headers in asked] == told
            if not trusted:
                http.post("/api/v1/tokens", json={"user": "x"}, headers={"X-Forwarded-For": "10.0.0.3"})
                assert http.get("/api/v1/audit").json()["lines"][0]["address"] == "10.0.0.3"
                login = http.post("/api/v1/login", json={"token": made.tokens["eve"]})
                assert "secure" in login.headers["set-cookie"].lower()
    finally:
        made.stop()


def test_streams_are_bounded(strict: Running) -> None:
    with _address(strict, 40) as http:
        bearer = {"Authorization": f"Bearer {strict.tokens['grace']}"}
        with http.stream("GET", "/api/v1/events/stream", headers=bearer) as first:
            lines = first.iter_lines()  # kept: without it the stream is closed
            assert next(lines)
            assert http.get("/api/v1/events/stream", headers=bearer).status_code == 503


def test_answers_say_that_no_page_may_embed_or_guess_them(strict: Running) -> None:
    with _address(strict, 60) as http:
        headers = http.get("/healthz").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "server" not in headers


def test_a_ledger_that_is_away_is_said_and_nothing_else_breaks(tmp_path: Path) -> None:
    made = make_running(tmp_path / "state").start()
    try:
        with made.http() as http:
            assert http.get("/readyz").json() == {"ready": True, "ledger": "ok", "driver": "none"}
            (tmp_path / "state" / "ledger.db").rename(tmp_path / "away")
            assert made.service is not None
            made.service.clients.close()
            (tmp_path / "state" / "ledger.db").write_bytes(b"this is no database, and never was one" * 100)
            answer = http.get("/readyz")
            assert (answer.status_code, answer.json()["ledger"]) == (503, "unreachable")
            assert http.get("/healthz").status_code == 200
    finally:
        made.stop()
