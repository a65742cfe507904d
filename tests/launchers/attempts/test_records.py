"""The verdict over what several nodes have written, and what must not outlive an attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orc.launchers.attempts.confidential import remove_confidential
from orc.launchers.attempts.reader import AttemptRecords, log_selectors, read_attempts, read_log
from orc.launchers.attempts.records import AttemptExit, RankFailure, merge
from orc.launchers.backends.base import Cause, LogSelector
from orc.launchers.remote.transport import LocalTransport


def record(node: int, outcome: str = "succeeded", **more: Any) -> dict[str, Any]:
    base = {
        "node": node,
        "host": f"host-{node}",
        "restart": 0,
        "outcome": outcome,
        "reason": "" if outcome == "succeeded" else f"{outcome} on {node}",
        "exit_status": 0 if outcome == "succeeded" else 1,
        "started_at": 100.0 + node,
        "ended_at": 200.0 + node,
        "ranks": {str(node): {"exit_code": 0 if outcome == "succeeded" else 1, "signal": None, "at": 150.0}},
    }
    return {**base, **more}


def failure(rank: int, at: float, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "node": rank, "host": f"host-{rank}", "exit_code": 1, "signal": None, "at": at, **more}


def test_without_records_there_is_no_verdict():
    assert merge([], 2) is None


def test_all_nodes_succeeded():
    merged = merge([record(1), record(0)], 2)
    assert merged is not None
    assert (merged.succeeded, merged.cause, merged.exit_status, merged.complete) == (True, None, 0, True)
    assert (merged.started_at, merged.ended_at, merged.hosts) == (100.0, 201.0, ("host-0", "host-1"))
    assert sorted(merged.ranks) == [0, 1]


def test_one_success_of_two_nodes_is_not_complete():
    merged = merge([record(0)], 2)
    assert merged is not None
    assert not merged.complete


def test_the_earliest_own_failure_names_the_rank_though_another_node_recorded_first():
    records = [
        record(0, "crash", first_failure=failure(0, at=155.0), exit_status=1, ended_at=160.0),
        record(1, "crash", first_failure=failure(1, at=150.0, exit_code=42), exit_status=42, ended_at=170.0),
    ]
    merged = merge(records, 2)
    assert merged is not None
    assert merged.first_failure is not None
    assert merged.first_failure.rank == 1
    assert (merged.exit_status, merged.reason) == (42, "rank 1 on host-1 exited with 42")


@pytest.mark.parametrize(
    ("outcomes", "cause"),
    [
        (["crash", "peer"], Cause.CRASH),
        (["peer", "crash"], Cause.CRASH),
        (["crash", "cancelled"], Cause.CANCELLED),
        (["crash", "preempted"], Cause.PREEMPTED),
        (["timeout", "crash"], Cause.TIMEOUT),
        (["launch", "peer"], Cause.LAUNCH),
        (["peer", "succeeded"], Cause.NODE_FAILURE),
        (["preempted", "cancelled"], Cause.CANCELLED),
        (["succeeded", "preempted"], Cause.PREEMPTED),
    ],
)
def test_what_a_person_or_the_platform_did_comes_before_what_followed_from_it(outcomes, cause):
    merged = merge([record(node, outcome) for node, outcome in enumerate(outcomes)], 2)
    assert merged is not None
    assert merged.cause is cause
    assert not merged.succeeded


def test_the_only_witness_of_a_lost_node_is_a_peer():
    merged = merge([record(0, "peer", peer_lost=True, reason="node 1 has been silent for 30 s")], 2)
    assert merged is not None
    assert (merged.cause, merged.reason) == (Cause.NODE_FAILURE, "node 1 has been silent for 30 s")
    assert not merged.complete


def test_an_elastic_gang_is_judged_without_the_nodes_that_it_went_on_without():
    lost = record(2, "peer", peer_lost=True)
    merged = merge([record(0, lost_nodes=[2]), record(1), lost], 3)
    assert merged is not None
    assert (merged.succeeded, merged.complete) == (True, True)
    assert list(merged.ranks) == [0, 1]
    assert AttemptRecords("a1", config={"nnodes": 3}, exits={0: record(0, lost_nodes=[2]), 1: record(1)}).complete
    assert not AttemptRecords("a1", config={"nnodes": 3}, exits={0: record(0), 1: record(1)}).complete


def test_an_exit_survives_as_json():
    merged = merge([record(0, "crash", first_failure=failure(0, at=1.5, signal="SIGKILL", exit_code=None))], 1)
    assert merged is not None
    assert AttemptExit.from_dict(merged.to_dict()) == merged
    assert merged.to_dict()["cause"] == "crash"


FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n    ~~~~^^\n'


@pytest.mark.parametrize(
    ("output", "exception"),
    [
        (f"epoch 1\n{FRAMES}ValueError: no such column: 'x'\n", "ValueError: no such column: 'x'"),
        (
            f"{FRAMES}KeyError: 'a'\n\nDuring handling …\n\n{FRAMES}torch.OutOfMemoryError: full\n",
            "torch.OutOfMemoryError: full",
        ),
        (
            f"{FRAMES}RuntimeError: Error(s) in loading:\n\tMissing key(s)\nbye\n",
            "RuntimeError: Error(s) in loading:",
        ),
        (f"{FRAMES}KeyboardInterrupt\n", "KeyboardInterrupt"),
        (f"{FRAMES}ValueError: {'x' * 5000}\n", "ValueError: " + "x" * 187 + "…"),
        ("segmentation fault\nValueError: of a program that goes on\n", ""),
        ("", ""),
    ],
)
def test_the_reason_of_a_crash_begins_with_the_exception(output, exception):
    merged = merge([record(0, "crash", first_failure=failure(0, at=155.0, log_tail=output))], 1)
    assert merged is not None
    ended = "rank 0 on host-0 exited with 1"
    assert merged.reason == (f"{exception} ({ended})" if exception else ended)


def test_a_failure_without_a_rank_is_told_by_node():
    assert RankFailure(None, 3, "h", exit_code=1).summary == "node 3 on h exited with 1"
    assert RankFailure(7, 3, "h", signal="SIGSEGV").summary == "rank 7 on h was killed by SIGSEGV"


def test_unknown_keys_of_newer_agents_are_ignored():
    merged = merge([record(0, "crash", first_failure={**failure(0, 1.0), "new": 1}, also_new={})], 1)
    assert merged is not None
    assert merged.first_failure == RankFailure(0, 0, "host-0", 1, None, 1.0)


def write(path: Any, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_only_records_of_the_newest_incarnation_are_read(tmp_path):
    write(tmp_path / "agent.json", '{"nnodes": 2}')
    for node, restart in ((0, 1), (1, 0)):
        write(tmp_path / f"node-{node}/lease.json", f'{{"restart": {restart}, "host": "h{node}", "at": 5.0}}')
        write(tmp_path / f"node-{node}/exit.json", f'{{"node": {node}, "restart": {restart}, "outcome": "succeeded"}}')
    (records,) = read_attempts(LocalTransport(), [str(tmp_path)]).values()
    assert records.restart == 1
    assert list(records.exits) == [0]
    assert not records.complete
    assert records.hosts == ("h0", "h1")


def test_a_damaged_record_is_as_if_it_were_not_there(tmp_path):
    write(tmp_path / "agent.json", '{"nnodes": 1}')
    write(tmp_path / "node-0/lease.json", '{"restart": 0}')
    write(tmp_path / "node-0/exit.json", "")
    (records,) = read_attempts(LocalTransport(), [str(tmp_path)]).values()
    assert (records.complete, records.verdict) == (False, None)


def test_an_attempt_that_was_never_written_reads_as_nothing(tmp_path):
    (records,) = read_attempts(LocalTransport(), [str(tmp_path / "none")]).values()
    assert records == AttemptRecords(str(tmp_path / "none"))
    assert (records.verdict, records.started_at, records.last_sign, records.states) == (None, None, None, ())
    assert log_selectors(LocalTransport(), str(tmp_path / "none")) == []
    assert list(read_log(LocalTransport(), str(tmp_path / "none"), LogSelector(rank=0))) == []


def test_the_newest_progress_of_several_nodes_counts():
    beats = {0: {"progress": {"step": 3}}, 1: {"progress": {"step": 10}}, 2: {"progress": {}}, 3: {}}
    assert AttemptRecords("x", heartbeats=beats).progress == {"step": 10}


def test_logs_are_listed_by_number(tmp_path):
    for name in ("rank-10.log", "rank-2.log", "node-0.log", "rank-0.log", "launcher.log", "rank-x.log"):
        write(tmp_path / "logs" / name, "")
    assert log_selectors(LocalTransport(), str(tmp_path)) == [
        LogSelector(rank=0),
        LogSelector(rank=2),
        LogSelector(rank=10),
        LogSelector(node=0),
        LogSelector(launcher=True),
    ]


def test_errors_of_gpus_on_any_node_are_part_of_the_reason_but_not_of_what_was_asked_for():
    crash = record(0, "crash", first_failure=failure(0, 5.0))
    ill = record(1, "peer", gpu_errors="GPU 0000:3b:00 of rank 1: Xid 79")
    verdict = merge([crash, ill], 2)
    assert verdict is not None
    assert verdict.reason == "rank 0 on host-0 exited with 1; host-1: GPU 0000:3b:00 of rank 1: Xid 79"
    cancelled = merge([record(0, "cancelled"), ill], 2)
    assert cancelled is not None
    assert cancelled.reason == "cancelled on 0"


def test_secrets_go_with_what_a_killed_writer_has_left_of_them(tmp_path: Path) -> None:
    names = (
        "secrets.json",
        ".secrets.json.0f1e2d.tmp",
        ".link.json.0f1e2d.tmp",
        "agent.json",
        ".agent.json.0f1e2d.tmp",
    )
    attempts = [tmp_path / "it's *" / "a1", tmp_path / "job" / "a1", tmp_path / "job" / "none"]
    for attempt in attempts[:2]:
        attempt.mkdir(parents=True)
        for name in names:
            (attempt / name).touch()
    remove_confidential(LocalTransport(), [str(attempt) for attempt in attempts])
    for attempt in attempts[:2]:
        assert {path.name for path in attempt.iterdir()} == {"agent.json", ".agent.json.0f1e2d.tmp"}
