"""Slurm's word against the agents' records: who is believed about what."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.slurm.queue_rows import JobRow
from orc.launchers.backends.slurm.verdict import LOST_AFTER_S, judge

T0 = 1_700_000_000.0


def row(state: str, **more: Any) -> JobRow:
    values: dict[str, Any] = {"submitted_at": T0, "started_at": T0 + 10, "ended_at": T0 + 100, "limit_s": 3600.0}
    return JobRow("12", "orc-d-a1", state, nodes=("node1", "node2"), **{**values, **more})


def record(cause: Cause | None = None, *, ended_at: float = T0 + 90, reason: str = "", **more: Any) -> dict[str, Any]:
    """An exit record of node 0."""
    crash = {"first_failure": {"rank": 1, "node": 0, "host": "node1", "exit_code": 42}} if cause is Cause.CRASH else {}
    outcome = {"outcome": cause or "succeeded", "reason": reason, "exit_status": 42 if cause else 0}
    return {"node": 0, "host": "node1", "started_at": T0 + 11, "ended_at": ended_at, **outcome, **crash, **more}


def agents(left: dict[str, Any] | None = None, *hosts: str, nnodes: int = 0, **more: Any) -> AttemptRecords:
    """Records of an attempt whose agents started on *hosts*, of which the first may have *left* an exit record."""
    leases = {node: {"host": host} for node, host in enumerate(hosts)}
    config = {"nnodes": nnodes or max(len(hosts), 1)}
    return AttemptRecords("/a1", config, leases=leases, exits={0: left} if left else {}, **more)


def look(slurm: JobRow | None, records: AttemptRecords | None = None, **more: Any) -> Observation:
    values: dict[str, Any] = {"submitted_at": T0, "now": T0 + 1000, "lead_s": 70.0, "asked_everyone": True}
    return judge(slurm, records or agents(), **{**values, **more})


def test_a_waiting_job_says_why() -> None:
    seen = look(row("PENDING", reason="Resources"))
    assert (seen.phase, seen.reason) == (Phase.PENDING, "Resources")


@pytest.mark.parametrize("reason", ["PartitionNodeLimit", "PartitionTimeLimit", "DependencyNeverSatisfied"])
def test_a_reason_that_does_not_go_away_is_called_that(reason: str) -> None:
    seen = look(row("PENDING", reason=reason))
    assert seen.phase is Phase.PENDING
    assert seen.reason.startswith(f"{reason}: ")
    assert seen.reason.endswith("it may wait for ever")


def test_a_requeued_job_waits_and_shows_that_it_has_run_before() -> None:
    seen = look(row("PENDING", reason="BeginTime"), agents(record(Cause.PREEMPTED), "node1"))
    assert (seen.phase, seen.restarts, seen.exit) == (Phase.PENDING, 1, None)


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "SUSPENDED"])
def test_a_job_that_has_nodes_runs_whatever_the_records_say(state: str) -> None:
    beats = {0: {"progress": {"step": 7}}}
    seen = look(row(state), agents(record(Cause.PREEMPTED), "node1", restart=2, heartbeats=beats))
    assert (seen.phase, seen.exit, seen.ended_at) == (Phase.RUNNING, None, None)
    assert (seen.hosts, seen.restarts, seen.progress) == (("node1",), 2, {"step": 7})


def test_success_is_what_the_records_say() -> None:
    seen = look(row("COMPLETED"), agents(record()))
    assert (seen.phase, seen.cause, seen.ended_at) == (Phase.SUCCEEDED, None, T0 + 90)


def test_success_survives_what_slurm_does_afterwards() -> None:
    assert look(row("NODE_FAIL"), agents(record())).phase is Phase.SUCCEEDED
    assert look(row("CANCELLED"), agents(record())).phase is Phase.SUCCEEDED


def test_a_crash_names_the_first_failing_rank() -> None:
    seen = look(row("FAILED", exit_code=42), agents(record(Cause.CRASH)))
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert seen.reason == "rank 1 on node1 exited with 42"
    assert seen.exit is not None
    assert seen.exit.first_failure is not None


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("TIMEOUT", Cause.TIMEOUT),
        ("DEADLINE", Cause.TIMEOUT),
        ("NODE_FAIL", Cause.NODE_FAILURE),
        ("BOOT_FAIL", Cause.NODE_FAILURE),
        ("PREEMPTED", Cause.PREEMPTED),
        ("OUT_OF_MEMORY", Cause.CRASH),
    ],
)
@pytest.mark.parametrize("records", [agents(), agents(record(Cause.PREEMPTED))])
def test_what_slurm_did_is_taken_from_slurm(state: str, cause: Cause, records: AttemptRecords) -> None:
    seen = look(row(state), records)
    assert (seen.phase, seen.cause) == (Phase.FAILED, cause)
    assert seen.reason


def test_a_crash_before_slurm_ended_the_job_stays_a_crash() -> None:
    assert look(row("TIMEOUT"), agents(record(Cause.CRASH))).cause is Cause.CRASH
    assert look(row("CANCELLED"), agents(record(Cause.CRASH))).cause is Cause.CRASH


def test_a_crash_that_follows_from_a_dead_node_is_a_node_failure() -> None:
    seen = look(row("NODE_FAIL", failed_node="node2"), agents(record(Cause.CRASH)))
    assert (seen.cause, seen.reason) == (Cause.NODE_FAILURE, "NODE_FAIL: node2 failed")


def test_a_crash_while_another_node_fell_silent_is_a_node_failure() -> None:
    seen = look(row("FAILED", exit_code=1), agents(record(Cause.CRASH), "node1", "node2"))
    assert seen.cause is Cause.NODE_FAILURE
    assert seen.reason == "no exit record from node2; rank 1 on node1 exited with 42"


def test_a_preemption_notice_that_slurm_knows_nothing_of_came_from_srun_because_another_agent_died() -> None:
    left = agents(record(Cause.PREEMPTED, reason="preempted (SIGTERM)"), "node1", "node2")
    seen = look(row("FAILED", exit_code=137), left)
    assert (seen.cause, seen.failed_hosts) == (Cause.NODE_FAILURE, ("node2",))
    assert look(row("PREEMPTED"), left).cause is Cause.PREEMPTED
    assert look(row("FAILED"), agents(record(Cause.PREEMPTED))).cause is Cause.PREEMPTED


def test_the_node_that_failed_is_blamed_by_slurm_s_word_else_by_the_agents() -> None:
    both = ("node1", "node2")
    assert look(row("NODE_FAIL", failed_node="node2"), agents(None, *both)).failed_hosts == ("node2",)
    assert look(row("FAILED", exit_code=1), agents(record(Cause.CRASH), *both)).failed_hosts == ("node2",)
    missed = agents(None, *both, stop=record(Cause.NODE_FAILURE, lost_node=1))
    assert look(row("FAILED", exit_code=1), missed).failed_hosts == ("node2",)
    # A host name that Slurm does not know as a node is of no use to it.
    assert look(row("FAILED", exit_code=1), agents(record(Cause.CRASH), "node1", "other")).failed_hosts == ()


def test_where_all_nodes_fell_silent_none_is_blamed_unless_slurm_says_so() -> None:
    both = ("node1", "node2")
    silent = agents(None, *both)
    seen = look(row("FAILED", exit_code=137), silent)
    assert (seen.cause, seen.failed_hosts) == (Cause.NODE_FAILURE, ())
    assert seen.reason == "the agents on node1, node2 left no exit record; Slurm says FAILED (exit code 137)"
    # One had said that it stops, and did not live to write its record.
    told = agents(None, *both, stop=record(Cause.PREEMPTED))
    assert look(row("FAILED", exit_code=137), told).failed_hosts == ()
    alone = JobRow("12", "orc-d-a1", "NODE_FAIL", T0, T0 + 10, T0 + 100, nodes=("node1",))
    assert look(alone, agents(None, "node1")).failed_hosts == ("node1",)
    assert look(dataclasses.replace(alone, state="FAILED"), agents(None, "node1")).failed_hosts == ()


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "PENDING"])
def test_success_that_every_node_has_recorded_is_final_whatever_slurm_still_holds(state: str) -> None:
    whole = agents(record(), "node1")
    assert look(row(state), whole).phase is Phase.SUCCEEDED
    assert look(row(state), whole, now=T0 + 91).phase is not Phase.SUCCEEDED, "Slurm has not had the time to end it"
    assert not look(row(state), agents(record(), "node1", "node2")).phase.ended
    assert not look(row(state), agents(record(Cause.CRASH), "node1")).phase.ended


def test_a_completed_job_that_somebody_has_requeued_keeps_its_records() -> None:
    again = row("COMPLETED", started_at=T0 + 500, ended_at=T0 + 501)
    seen = look(again, agents(record(), "node1"))
    assert (seen.phase, seen.reason, seen.ended_at) == (Phase.SUCCEEDED, "", T0 + 90)
    assert seen.exit is not None


@pytest.mark.parametrize("state", ["TIMEOUT", "CANCELLED", "PREEMPTED", "OUT_OF_MEMORY"])
def test_no_node_is_blamed_for_any_other_end(state: str) -> None:
    assert look(row(state, failed_node="node2"), agents(None, "node1", "node2")).failed_hosts == ()


def test_the_agents_time_limit_is_a_time_limit() -> None:
    seen = look(row("FAILED", exit_code=124), agents(record(Cause.TIMEOUT, reason="time limit of 50 s reached")))
    assert (seen.phase, seen.cause, seen.reason) == (Phase.FAILED, Cause.TIMEOUT, "time limit of 50 s reached")


def test_a_notice_shortly_before_the_limit_was_about_the_limit() -> None:
    late = record(Cause.PREEMPTED, ended_at=T0 + 10 + 3600 - 60)
    early = record(Cause.PREEMPTED, ended_at=T0 + 10 + 3600 - 80)
    assert look(row("FAILED", exit_code=75), agents(late)).cause is Cause.TIMEOUT
    assert look(row("FAILED", exit_code=75), agents(early)).cause is Cause.PREEMPTED


def test_cancelled_by_somebody_else_in_slurm() -> None:
    seen = look(row("CANCELLED", by="1000"), agents(record(Cause.PREEMPTED)))
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert seen.reason == "cancelled in Slurm by user 1000"


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "TIMEOUT"])
def test_cancelled_through_orc_is_cancelled_however_slurm_calls_it(state: str) -> None:
    assert look(row(state), agents(record(Cause.CANCELLED), cancel={})).phase is Phase.CANCELLED
    assert look(row(state), agents(cancel={})).phase is Phase.CANCELLED


def test_a_crash_before_the_cancellation_stays_a_crash() -> None:
    assert look(row("FAILED", exit_code=42), agents(record(Cause.CRASH), cancel={})).cause is Cause.CRASH


def test_a_script_that_ended_before_any_agent_could_not_be_launched() -> None:
    seen = look(row("FAILED", exit_code=127))
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.LAUNCH)
    assert "exit code 127" in seen.reason
    assert "/a1/logs/launcher.log" in seen.reason


def test_agents_that_were_cut_off_are_a_node_failure() -> None:
    seen = look(row("FAILED", exit_code=137), agents(None, "node2"))
    assert seen.cause is Cause.NODE_FAILURE
    assert "node2" in seen.reason


def test_no_trace_is_unknown_at_first_and_lost_later() -> None:
    assert look(None, now=T0 + LOST_AFTER_S - 1).phase is Phase.UNKNOWN
    assert look(None, now=T0 + LOST_AFTER_S + 1).phase is Phase.LOST


def test_no_trace_is_never_lost_while_accounting_cannot_be_asked() -> None:
    assert look(None, now=T0 + 1e6, asked_everyone=False).phase is Phase.UNKNOWN


def test_a_job_that_slurm_has_lost_runs_while_its_agents_live() -> None:
    beat = {0: {"at": T0 + 995}}
    alive = agents(None, "node1", heartbeats=beat)
    assert look(None, alive).phase is Phase.RUNNING
    ending = agents(record(Cause.CRASH), "node1", nnodes=2, heartbeats=beat)
    assert look(None, ending).phase is Phase.RUNNING
    assert look(None, alive, now=T0 + 995 + LOST_AFTER_S - 1).phase is Phase.UNKNOWN
    assert look(None, alive, now=T0 + 995 + LOST_AFTER_S + 1).phase is Phase.LOST
    assert look(None, ending, now=T0 + 995 + LOST_AFTER_S + 1).cause is Cause.CRASH


@pytest.mark.parametrize("asked", [True, False])
def test_records_speak_when_slurm_has_forgotten(asked: bool) -> None:
    assert look(None, agents(record()), asked_everyone=asked).phase is Phase.SUCCEEDED
    seen = look(None, agents(record(Cause.CRASH)), asked_everyone=asked)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)


def test_records_of_an_earlier_run_say_nothing_about_this_one() -> None:
    old = record(Cause.PREEMPTED, ended_at=T0 - 100)
    seen = look(row("FAILED", exit_code=77), agents(old, "node1"))
    assert seen.cause is Cause.LAUNCH
