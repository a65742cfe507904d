"""What waits for clusters keeps nobody else waiting."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_service import LoggingBackend, Running, make_running

from orc.orchestrator.service import request_limits

JOB = "digits-aaaaaa"
SLOW = (f"jobs/{JOB}/metrics?points=10", f"jobs/{JOB}/metrics", f"jobs/{JOB}/logs", f"diff?a={JOB}&b={JOB}")
SLOW += (
    f"jobs/{JOB}/ranks",
    f"jobs/{JOB}/merged-log",
    "groups/@last?metrics=true",
    f"jobs/{JOB}/log",
    f"jobs/{JOB}/log/search?q=x",
)


class Held:
    """A cluster whose files nobody gets until it is opened."""

    def __init__(self) -> None:
        self.open, self.asked = threading.Event(), threading.Semaphore(0)

    def wait(self) -> None:
        self.asked.release()
        assert self.open.wait(60)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    made = make_running(tmp_path / "state", threads=4, max_streams_per_token=3)
    made.add_job(JOB, "eve")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def held(service: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()

    def read_file(*_: Any) -> bytes:
        held.wait()
        return b""

    monkeypatch.setattr(LoggingBackend, "read_file", read_file)
    yield held
    held.open.set()


def test_a_viewer_whose_reads_hang_keeps_no_route_and_no_other_user_waiting(service: Running, held: Held) -> None:
    """20 requests of one viewer, of a service with four threads: everything else answers meanwhile."""
    with ThreadPoolExecutor(20) as pool, service.http("eve") as viewer:
        hanging = [pool.submit(viewer.get, f"/api/v1/{SLOW[0]}") for _ in range(20)]
        assert held.asked.acquire(timeout=60)
        with service.http("ada") as admin:
            for path in ("/healthz", "/readyz", "/metrics", "/api/v1/jobs", f"/api/v1/jobs/{JOB}"):
                assert admin.get(path).status_code == 200, path
            assert admin.get(f"/api/v1/jobs/{JOB}/log").status_code == 200  # among the slow ones, too
        held.open.set()
        assert {answer.result(60).status_code for answer in hanging} == {200}


def test_one_token_waits_for_a_bounded_number_of_answers(service: Running, held: Held) -> None:
    with ThreadPoolExecutor(request_limits._MOST_WAITING) as pool, service.http("eve", limits=httpx.Limits()) as viewer:
        hanging = [pool.submit(viewer.get, f"/api/v1/{SLOW[0]}") for _ in range(request_limits._MOST_WAITING)]
        assert service.service is not None
        reads = service.service.slow_reads
        assert held.asked.acquire(timeout=60)
        while max(reads._readers.values()) < request_limits._MOST_WAITING:
            assert not any(one.done() for one in hanging)
        refused = viewer.get(f"/api/v1/{SLOW[1]}")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        held.open.set()
        assert {answer.result(60).status_code for answer in hanging} == {200}
    assert (reads._readers, reads._limiters) == ({}, {})


def test_streams_of_a_token_are_limited_by_themselves(service: Running) -> None:
    with service.http("eve") as viewer, service.http("ada") as admin:
        streams = [viewer.stream("GET", "/api/v1/events/stream") for _ in range(3)]
        lines = [stream.__enter__().iter_lines() for stream in streams]
        assert all(map(next, lines))
        assert viewer.get("/api/v1/events/stream").status_code == 429
        with admin.stream("GET", "/api/v1/events/stream") as other:
            assert other.status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)


@pytest.fixture
def measured(service: Running) -> Path:
    path = service.state_dir / "fake" / "files" / f"orc-{JOB}" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    return path


def test_lines_come_in_parts_and_curves_grow(service: Running, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orc.orchestrator.service.api.insight._MOST_LINES", 4)
    lines = [{"at": float(step), "step": step, "loss": step / 2} for step in range(10)]
    measured.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with service.http("eve") as viewer:
        parts, after = [], ""
        while not parts or not parts[-1]["complete"]:
            parts.append(viewer.get(f"/api/v1/jobs/{JOB}/metrics", params={"after": after}).json())
            after = parts[-1]["next"]
        assert [len(part["lines"]) for part in parts] == [4, 4, 2]
        assert [line for part in parts for line in part["lines"]] == lines
        assert viewer.get(f"/api/v1/{SLOW[0]}").json()["series"] == {"loss": [[step, step / 2] for step in range(10)]}
        assert viewer.get(f"/api/v1/jobs/{JOB}/metrics", params={"after": "x"}).status_code == 422


@pytest.mark.parametrize("content", ['{"\\ud800": 1, "step": 1, "x": 1e999}\n', "[" * 100_000, '{"a":' * 50_000, ""])
def test_nonsense_is_answered_with_what_else_there_is(service: Running, measured: Path, content: str) -> None:
    measured.write_text(content + '\n{"step": 1, "loss": 2}\n')
    with service.http("eve") as viewer:
        assert viewer.get(f"/api/v1/{SLOW[0]}").json()["series"]["loss"] == [[1, 2]]
        assert viewer.get(f"/api/v1/{SLOW[1]}").json()["lines"][-1] == {"step": 1, "loss": 2}


def test_all_routes_that_ask_clusters_are_among_the_slow_ones(service: Running) -> None:
    """A file or a host that hangs is met in no thread of the other routes."""
    seen = {}
    run = request_limits.SlowReads.run

    async def noted(self: Any, token_id: str, read: Any) -> Any:
        seen[read.func.__name__] = True
        return await run(self, token_id, read)

    with pytest.MonkeyPatch.context() as patched, service.http("eve") as viewer:
        patched.setattr(request_limits.SlowReads, "run", noted)
        for path in (*SLOW, "clusters/local/queue"):
            viewer.get(f"/api/v1/{path}")
    assert seen.keys() == {
        *(
            "read_metrics",
            "read_ranks",
            "list_logs",
            "merge_logs",
            "diff_jobs",
            "get_group",
            "read_log",
            "find_in_log",
            "read_queue",
        )
    }


def test_positions_in_logs_that_no_answer_gives_are_refused(service: Running) -> None:
    with service.http("eve") as viewer:
        answers = [
            viewer.get(f"/api/v1/jobs/{JOB}/merged-log", params={"after": after}).status_code
            for after in ("", "0:5,11:7", "x", "0:-5", "0:1:2", "0:" + "9" * 19)
        ]
    assert answers == [200, 200, 422, 422, 422, 422]


def test_a_fifo_in_the_place_of_metrics_and_logs_is_as_if_not_there(service: Running, measured: Path) -> None:
    measured.unlink(missing_ok=True)
    os.mkfifo(service.log(f"orc-{JOB}-a1"))
    with service.http("eve") as viewer:
        assert viewer.get(f"/api/v1/jobs/{JOB}/log").content == b""
        assert viewer.get(f"/api/v1/jobs/{JOB}/log?tail=10").content == b""
        assert viewer.get(f"/api/v1/jobs/{JOB}/log/search?q=x").json()["matches"] == []
