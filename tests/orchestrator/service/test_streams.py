"""Server-sent events: nothing is lost or repeated, however often a listener is cut off, and however many there are."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import tracemalloc
from typing import Any

import httpx
import pytest
from running_service import sse_events

from orc.launchers.backends.base import LogSelector
from orc.orchestrator.service.api.log_contents import search_log
from orc.orchestrator.service.feeds import LogKey, whole_characters

FOLLOWERS = 100


def _take(answer: httpx.Response, wanted: int) -> list[dict[str, Any]]:
    found = []
    for event in sse_events(answer.iter_lines()):
        if "data" in event:
            found.append(event)
            if len(found) == wanted:
                break
    return found


def test_events_come_while_they_happen_and_go_on_after_the_last_one_seen(running: Any) -> None:
    with running.http("eve") as http:
        with http.stream("GET", "/api/v1/events/stream") as live:
            lines = sse_events(live.iter_lines())
            assert next(lines) == {"retry": 2000}
            done = threading.Thread(target=running.add_job, args=("stream-aaaaaa",))
            done.start()
            first = next(event for event in lines if "data" in event)
            assert (first["data"]["kind"], first["data"]["job"]) == ("queued", "stream-aaaaaa")
            done.join()
        history = http.get("/api/v1/jobs/stream-aaaaaa/events").json()["events"]
        # Cut off after the first: a browser sends its id again.
        again = {"Last-Event-ID": str(first["id"])}
        with http.stream("GET", "/api/v1/events/stream", headers=again) as resumed:
            rest = _take(resumed, len(history) - 1)
        assert [first["id"], *(event["id"] for event in rest)] == [event["id"] for event in history]
        assert {event["data"]["owner"] for event in rest} == {"grace"}
        running.add_job("other-aaaaaa")
        only = {"after": 0, "job": "stream-aaaaaa"}
        with http.stream("GET", "/api/v1/events/stream", params=only) as chosen:
            assert [e["id"] for e in _take(chosen, len(history))] == [e["id"] for e in history]


async def _follow(http: httpx.AsyncClient, cut_after: int) -> bytes:
    """Follow a log to its end; the connection is cut once, after some events."""
    found, offset, seen = b"", 0, 0
    while True:
        headers = {"Last-Event-ID": str(offset)} if offset else {}
        async with http.stream("GET", "/api/v1/jobs/followed-aaaaaa/log/stream", headers=headers) as answer:
            assert answer.status_code == 200
            event: dict[str, str] = {}
            async for line in answer.aiter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                    continue
                if event.get("event") == "end":
                    return found
                if "id" in event:
                    found += json.loads(event["data"])["text"].encode()
                    offset = int(event["id"])
                    assert offset == len(found)
                    seen += 1
                    if seen == cut_after:
                        break
                event = {}


def test_a_hundred_followers_of_a_growing_log_get_all_of_it(running: Any) -> None:
    marker = running.add_job("followed-aaaaaa")
    log = running.log(marker)
    lines = [f"step {number} gr\u00fc\u00dfe \u4f60\u597d {'x' * (number % 200)}\n".encode() for number in range(3000)]
    log.write_bytes(b"".join(lines[:500]))

    async def all_of_them() -> list[bytes]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Authorization": f"Bearer {running.tokens['eve']}"}
        async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=120, limits=limits) as http:
            followers = [asyncio.create_task(_follow(http, 2 + number % 7)) for number in range(FOLLOWERS)]
            with log.open("ab", buffering=0) as file:
                for start in range(500, 3000, 100):
                    part = b"".join(lines[start : start + 100])
                    middle = len(part) // 2 + start % 3  # a character may be cut there
                    for piece in (part[:middle], part[middle:]):
                        file.write(piece)
                        await asyncio.sleep(0.01)
            await asyncio.to_thread(running.end_job, "followed-aaaaaa")
            return await asyncio.gather(*followers)

    whole = b"".join(lines)
    assert all(found == whole for found in asyncio.run(all_of_them()))


def test_nothing_is_read_on_once_nobody_listens(running: Any) -> None:
    running.add_job("left-aaaaaa")
    running.log("orc-left-aaaaaa-a1").write_text("hello\n")
    with running.http("eve") as http:
        with (
            http.stream("GET", "/api/v1/jobs/left-aaaaaa/log/stream") as log,
            http.stream("GET", "/api/v1/events/stream", params={"after": 0}) as events,
        ):
            # Both are kept: a stream whose lines nobody holds is closed.
            pieces, changes = sse_events(log.iter_lines()), sse_events(events.iter_lines())
            assert next(event for event in pieces if "data" in event)["data"] == {"text": "hello\n"}
            assert next(event for event in changes if "data" in event)
            assert (len(running.service.logs), running.service.events.is_polling) == (1, True)
        until = time.monotonic() + 60
        while len(running.service.logs) or running.service.events.is_polling or running.service.metrics.streams_open:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_log_that_cannot_be_read_ends_its_stream_with_the_reason(running: Any, monkeypatch: Any) -> None:
    from running_service import LoggingBackend

    from orc.launchers.errors import BackendUnreachable

    running.add_job("mute-aaaaaa")

    def fail(*_: Any) -> str:
        raise BackendUnreachable("no answer", where="fake", hint="wait")

    monkeypatch.setattr(LoggingBackend, "log_file", fail)
    with running.http("eve") as http:
        with http.stream("GET", "/api/v1/jobs/mute-aaaaaa/log/stream") as answer:
            last = _take(answer, 1)
        assert (last[0]["event"], last[0]["data"]["what"]) == ("failed", "no answer")
        assert http.get("/api/v1/jobs/mute-aaaaaa/log").status_code == 503


def test_bytes_of_a_log_by_offset_and_from_its_end(running: Any) -> None:
    with running.http("eve") as http:
        part = http.get("/api/v1/jobs/digits-aaaaaa/log", params={"offset": 1, "limit": 3})
        assert (part.content, part.headers["x-orc-next-offset"]) == (b"ell", "4")
        assert http.get("/api/v1/jobs/digits-aaaaaa/log", params={"tail": 3}).content == b"lo\n"
        for beyond in (1 << 40, (1 << 62) - 1):  # further than files can be on any disk
            assert http.get("/api/v1/jobs/digits-aaaaaa/log", params={"offset": beyond}).content == b""
        assert http.get("/api/v1/jobs/digits-aaaaaa/log", params={"attempt": 2}).status_code == 404
        assert http.get("/api/v1/jobs/digits-aaaaaa/log", params={"rank": 0, "node": 0}).status_code == 422


def test_a_large_log_is_followed_and_searched_with_flat_memory(running: Any) -> None:
    """1 GB with holes: what it costs to read is the same, and the file system does not keep it."""
    marker = running.add_job("large-aaaaaa")
    log, size = running.log(marker), 1 << 30
    with log.open("wb") as file:
        file.write(b"loss=1.5 first\n")
        file.seek(300 << 20)
        file.write(b"\nNeedle in the MIDDLE\n")
        file.truncate(size)
        file.seek(0, os.SEEK_END)
        file.write(b"\nneedle at the end")
    running.end_job("large-aaaaaa")
    key = LogKey("large-aaaaaa", 1, LogSelector(rank=0))
    tracemalloc.start(1)
    with running.open_client() as client:
        matches, offset = [], 0
        while offset is not None:
            found = search_log(client, key, "eedle", offset=offset, limit=10)
            matches += found["matches"]
            offset = found["next"]
    texts = [match["text"] for match in matches]
    assert [text.strip("\0") for text in texts] == ["Needle in the MIDDLE", "needle at the end"]
    assert [match["offset"] for match in matches] == [(300 << 20) + 1, size + 1]

    # The tail of it arrives by the stream from an offset on, and only then.
    with running.http("eve") as http:
        near = size - (6 << 20)
        with http.stream("GET", "/api/v1/jobs/large-aaaaaa/log/stream", params={"offset": near}) as answer:
            *pieces, last = [event for event in sse_events(answer.iter_lines()) if "data" in event]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    log.unlink()
    assert last["event"] == "end"
    assert pieces[-1]["id"] == size + len("\nneedle at the end")
    assert sum(len(piece["data"]["text"]) for piece in pieces) == pieces[-1]["id"] - near
    assert peak < 150 << 20, f"{peak >> 20} MiB"


@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_a_search_gives_every_line_once_however_it_is_cut(running: Any, limit: int) -> None:
    marker = f"orc-search{limit}-aaaaaa-a1"
    running.add_job(f"search{limit}-aaaaaa")
    lines = [b"loss nan\n" if number % 7 == 0 else b"all is well (a+)+$\n" for number in range(50)]
    running.log(marker).write_bytes(b"".join(lines) + b"nan" * 2)
    found: list[int] = []
    with running.http("eve") as http:
        offset = 0
        while offset is not None:
            url = f"/api/v1/jobs/search{limit}-aaaaaa/log/search"
            answer = http.get(url, params={"q": "nan", "offset": offset, "limit": limit}).json()
            found += [match["offset"] for match in answer["matches"]]
            offset = answer["next"]
        starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
        assert found == [start for number, start in enumerate(starts) if number % 7 == 0 or number == len(lines)]
        assert http.get(url, params={"q": "LOSS N", "limit": 1}).json() == {"matches": [], "next": None}
        assert http.get(url, params={"q": "LOSS N", "ignore_case": True}).json()["matches"][0]["text"] == "loss nan"
        literal = http.get(url, params={"q": "(a+)+$", "limit": 1}).json()
        assert literal["matches"][0]["text"] == "all is well (a+)+$"


@pytest.mark.parametrize("cut", range(5))
def test_a_character_that_is_cut_waits_for_its_rest(cut: int) -> None:
    data = "a\u4f60b".encode()
    text, used = whole_characters(data[:cut])
    assert text.encode() + data[used:cut] == data[:cut]
    assert "\ufffd" not in text
