"""Logs of ranks as one."""

from __future__ import annotations

from orc.launchers.attempts.records import LogChunk, LogSelector
from orc.launchers.backends.base import Phase
from orc.orchestrator.api.logs import merge_logs
from orc.orchestrator.insight.log_times import UNKNOWN, merged


def test_lines_of_ranks_come_by_their_times_and_those_without_stay_with_the_line_before():
    logs = {
        1: b"no time yet\n2026-01-01T00:00:02Z b\n  goes on\n",
        0: b"2026-01-01T00:00:01Z a\n2026-01-01T00:00:03Z c\n",
    }
    found = list(merged(logs))
    texts = [(rank, line.decode().split("Z ")[-1].strip()) for _, rank, line in found]
    assert texts == [(1, "no time yet"), (0, "a"), (1, "b"), (1, "goes on"), (0, "c")]
    assert [at == UNKNOWN for at, _, _ in found] == [True, False, False, False, False]


def test_the_line_that_a_rank_did_not_end_is_shown_when_its_job_has_ended(client, backend, job_file):
    job = client.submit(job_file())
    assert merge_logs(client.session, job.id).lines == []
    backend.set(job.attempt.marker, Phase.FAILED)
    client.refresh()
    (line,) = merge_logs(client.session, job.id, after="0:4").lines
    assert (line.rank, line.text) == (0, f"of {job.attempt.marker}")


def test_an_answer_without_time_for_the_logs_of_all_ranks_leaves_the_others_to_the_next(
    client, backend, job_file, monkeypatch
):
    def logs(handle, selector, offset=0):
        yield LogChunk(selector, offset, f"line of {selector.rank}\n".encode()[offset:])

    monkeypatch.setattr(backend, "log_selectors", lambda _: [LogSelector(rank=rank) for rank in range(3)])
    monkeypatch.setattr(backend, "logs", logs)
    job = client.submit(job_file())
    client.session.measured.seconds = 0.0
    told, after = [], ""
    for _ in range(3):
        answer = merge_logs(client.session, job.id, after=after)
        told += [line.text for line in answer.lines]
        after = answer.next
    assert told == ["line of 0", "line of 1", "line of 2"]
