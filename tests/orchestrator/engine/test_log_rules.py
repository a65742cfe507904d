from __future__ import annotations

from datetime import timedelta

import pytest

from orc.launchers.attempts.records import AttemptExit, LogChunk, LogSelector, RankFailure
from orc.launchers.backends.base import Cause, Handle, Phase
from orc.orchestrator.engine import log_rules

ALL_CAUSES = {"max_attempts": 5, "on": ["node_failure"], "backoff": 0}


class Log:
    """A backend with one log, which counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.read, self.calls = data, 0, 0

    def logs(self, handle, selector, offset=0):
        self.calls += 1
        for start in range(offset, len(self.data), 1 << 20):
            piece = self.data[start : start + (1 << 20)]
            self.read += len(piece)
            yield LogChunk(selector, start, piece)


@pytest.mark.parametrize("size", [0, 1, 999, 1 << 20, (1 << 20) + 1, 5 * (1 << 20) + 17, 40 << 20])
def test_the_end_of_a_log_is_found_without_reading_all_of_it(size):
    data = (b"%07d\n" * (size // 8 + 1) % tuple(range(size // 8 + 1)))[:size]
    log = Log(data)
    assert log_rules.tail(log, None, LogSelector(rank=0)) == data[-log_rules.TAIL_BYTES :]
    assert log.read <= 16 << 20
    assert log.calls <= 20


def test_the_order_of_the_rules_decides_and_then_that_of_the_logs():
    texts = ["nothing here", "ab\nerror: 7\n", "error: 9\nfatal\n"]
    assert log_rules.search(["fatal", "error"], texts) == (0, 2, "fatal")
    assert log_rules.search(["absent", r"error: \d"], texts) == (1, 1, "error: 7")
    assert log_rules.search(["absent"], texts) is None


@pytest.fixture
def fails(client, backend, job_file, monkeypatch):
    """Submits a job on two nodes that fails on the second with these lines in its log; the job after one pass."""

    def run(rules, line, cause="crash", **retry):
        view = client.submit(job_file(retry={**ALL_CAUSES, **retry, "on_log": rules}))
        marker = view.attempt.marker
        failure = RankFailure(1, 1, "node-b", 1, None, 5.0, "")
        end = AttemptExit(
            False, Cause(cause), failure.summary, 1, failure, 1.0, 5.0, ("node-a", "node-b"), True,
            {0: {"exit_code": 0}, 1: {"exit_code": 1}},
        )  # fmt: skip
        monkeypatch.setattr(backend, "log_selectors", lambda _: [LogSelector(rank=0), LogSelector(rank=1)])
        logs = {0: b"fine\n", 1: f"Traceback\n{line}\n".encode()}
        monkeypatch.setattr(backend, "logs", lambda h, s, offset=0: iter(
            [LogChunk(s, offset, logs[s.rank][offset:])] if logs[s.rank][offset:] else []
        ))  # fmt: skip
        reason = failure.summary
        backend.set(marker, Phase.FAILED, cause=cause, reason=reason, hosts=("node-a", "node-b"), exit=end.to_dict())
        client.refresh()
        return client.job(view.id)

    return run


def test_a_line_can_bring_another_attempt_that_the_cause_would_not(fails):
    after = fails([{"pattern": "NCCL timeout", "action": "retry"}], "E0 NCCL timeout after 600 s")
    assert [a.state for a in after.attempts] == ["FAILED", "PENDING"]
    assert after.attempts[0].reason == "rank 1 on node-b exited with 1; log: E0 NCCL timeout after 600 s"


def test_a_line_can_end_the_job_although_its_cause_is_listed(fails):
    after = fails([{"pattern": "^ValueError", "action": "fail"}], "ValueError: no such column", "node_failure")
    assert (after.state, after.reason) == (
        "FAILED",
        "rank 1 on node-b exited with 1; log: ValueError: no such column",
    )


def test_a_line_can_exclude_the_host_that_said_it(fails):
    after = fails([{"pattern": "ECC", "action": "exclude_node"}], "GPU 3: uncorrectable ECC error")
    assert after.attempts[0].failed_hosts == ("node-b",)
    assert len(after.attempts) == 2


def test_the_first_rule_that_matches_decides_and_without_one_the_cause(fails):
    rules = [{"pattern": "absent", "action": "retry"}, {"pattern": "Error", "action": "fail"}]
    assert fails(rules, "OSError: Error 5", "node_failure").state == "FAILED"
    assert fails(rules[:1], "OSError: Error 5").state == "FAILED"
    assert fails(rules[:1], "OSError: Error 5", "node_failure").attempt.number == 2


def test_attempts_come_to_an_end_although_a_rule_wants_more(fails):
    after = fails([{"pattern": "boom", "action": "retry"}], "boom", max_attempts=1)
    assert (after.state, len(after.attempts)) == ("FAILED", 1)


def test_a_search_that_takes_too_long_is_said_and_the_cause_decides(fails, monkeypatch):
    monkeypatch.setattr(log_rules, "SEARCH_S", 0.5)
    after = fails([{"pattern": "a(.*,.*,.*,.*,.*,.*,.*,.*,)b$", "action": "retry"}], "a" + "," * 1900)
    assert after.state == "FAILED"
    assert "searching the logs for retry.on_log took longer" in after.reason


def test_logs_that_cannot_be_read_are_said_and_the_cause_decides(client, backend, job_file, monkeypatch, see):
    from orc.launchers.errors import BackendUnreachable

    def away(_: Handle) -> list[LogSelector]:
        raise BackendUnreachable("no answer from n1", where="n1")

    monkeypatch.setattr(backend, "log_selectors", away)
    rules = [{"pattern": "x", "action": "fail"}]
    view = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0, "on_log": rules}))
    after = see(view, Phase.FAILED, cause="crash", reason="boom")
    assert after.attempt.number == 2
    assert after.attempts[0].reason == "boom; not all logs could be read: no answer from n1"


def test_a_job_that_was_cancelled_has_no_use_for_rules(client, backend, job_file, monkeypatch):
    monkeypatch.setattr(backend, "log_selectors", lambda _: 1 / 0)
    view = client.submit(job_file(retry={**ALL_CAUSES, "on_log": [{"pattern": "x", "action": "retry"}]}))
    client.cancel([view.id], grace_s=timedelta(seconds=1).total_seconds())
    client.refresh()
    assert client.job(view.id).state == "CANCELLED"
