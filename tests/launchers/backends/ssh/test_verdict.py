"""What is said of an attempt when some hosts answer and others do not."""

from __future__ import annotations

from typing import Any

import pytest

from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.ssh.verdict import HostStatus, judge, merge_records, nodes_of

HOSTS = ("a", "b")
PEER_TIMEOUT_S = 30.0


def lease(node: int) -> dict[str, Any]:
    return {f"node-{node}/lease.json": {"owner": "ssh:m", "restart": 0, "at": 100.0, "host": f"internal-{node}"}}


def beat(node: int, state: str = "running", **more: Any) -> dict[str, Any]:
    return {f"node-{node}/heartbeat.json": {"at": 110.0, "restart": 0, "state": state, "progress": {}, **more}}


def ended(node: int, outcome: str = "succeeded", *, at: float = 120.0, **more: Any) -> dict[str, Any]:
    record = {
        "node": node,
        "host": f"internal-{node}",
        "restart": 0,
        "started_at": 100.0,
        "ended_at": at,
        "outcome": outcome,
        "reason": "",
        "exit_status": 0 if outcome == "succeeded" else 1,
        "first_failure": None,
        "ranks": {str(node): {"exit_code": 0, "signal": None, "at": at}},
        **more,
    }
    return {f"node-{node}/exit.json": record}


def crashed(node: int, at: float = 119.0) -> dict[str, Any]:
    failure = {"rank": node, "node": node, "host": f"internal-{node}", "exit_code": 42, "signal": None, "at": at}
    return ended(node, "crash", first_failure=failure, exit_status=42, reason=f"rank {node} exited with 42")


def host(
    name: str, *records: dict[str, Any], alive: bool = False, age: float = 1.0, silence: float = 1.0, **more: Any
) -> HostStatus:
    """A host that answers; *age* is that of all records, *silence* that of its agent's last sign, in seconds."""
    merged = {key: value for record in records for key, value in record.items()}
    answer = {
        "there": True,
        "node": HOSTS.index(name),
        "config": {"hosts": [{"name": name} for name in HOSTS]},
        "linked": True,
        "age": age,
        "records": merged,
        "ages": dict.fromkeys(merged, age),
        "alive": alive,
        "silence": silence,
    }
    return HostStatus(name, answer, **more)


def silent(name: str) -> HostStatus:
    return HostStatus(name, why="timed out")


def verdict(*sights: HostStatus) -> Observation:
    by_name = {sight.host: sight for sight in sights}
    records = merge_records("/r/jobs/j/a1", HOSTS, by_name)
    return judge(records, nodes_of(HOSTS, by_name), peer_timeout_s=PEER_TIMEOUT_S)


def test_a_running_attempt_is_running_while_any_agent_lives() -> None:
    both = verdict(host("a", lease(0), beat(0), alive=True), host("b", lease(1), beat(1), alive=True))
    assert (both.phase, both.hosts, both.reason) == (Phase.RUNNING, HOSTS, "")
    one = verdict(host("a", lease(0), lease(1), beat(0), beat(1), alive=True), silent("b"))
    assert (one.phase, one.reason) == (Phase.RUNNING, "no answer from b")


def test_nobody_answers_is_never_a_failure() -> None:
    seen = verdict(silent("a"), silent("b"))
    assert (seen.phase, seen.reason) == (Phase.UNKNOWN, "no answer from a, b: timed out")


def test_an_attempt_that_was_started_half_is_starting() -> None:
    seen = verdict(host("a", lease(0), alive=True), host("b"))
    assert (seen.phase, seen.reason) == (Phase.PENDING, "starting on b")


def test_success_needs_the_record_of_every_node_on_whatever_host_it_is() -> None:
    seen = verdict(host("a", lease(0), ended(0)), host("b", lease(1), ended(1)))
    assert (seen.phase, seen.exit.complete, seen.exit.hosts) == (Phase.SUCCEEDED, True, HOSTS)
    mirrored = verdict(host("a", lease(0), lease(1), ended(0), ended(1)), silent("b"))
    assert (mirrored.phase, mirrored.exit.complete) == (Phase.SUCCEEDED, True)


def test_an_agent_that_only_stays_for_the_others_sake_is_not_waited_for() -> None:
    seen = verdict(host("a", lease(0), ended(0), alive=True), host("b", lease(1), ended(1), alive=True))
    assert seen.phase is Phase.SUCCEEDED
    one = verdict(host("a", lease(0), ended(0), alive=True), host("b", lease(1), beat(1), alive=True))
    assert one.phase is Phase.RUNNING


def test_the_first_failing_rank_is_named_with_the_clusters_name_of_its_host() -> None:
    seen = verdict(host("a", lease(0), ended(0, "peer", at=121.0)), host("b", lease(1), crashed(1)))
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert (seen.exit.first_failure.rank, seen.exit.first_failure.host) == (1, "b")
    assert seen.reason == "rank 1 on b exited with 42"


def test_a_host_whose_clock_is_an_hour_ahead_does_not_change_who_failed_first() -> None:
    late = host("b", lease(1), crashed(1, at=3719.0), ahead_s=3600.0)
    seen = verdict(host("a", lease(0), crashed(0, at=120.0)), late)
    assert seen.exit.first_failure.rank == 1
    assert seen.exit.first_failure.at == pytest.approx(119.0)


@pytest.mark.parametrize(
    ("age", "phase"), [(10.0, Phase.UNKNOWN), (PEER_TIMEOUT_S + 14, Phase.UNKNOWN), (PEER_TIMEOUT_S + 16, Phase.LOST)]
)
def test_an_attempt_is_lost_only_when_a_silent_host_must_have_ended_its_part(age: float, phase: Phase) -> None:
    peer = ended(0, "peer", peer_lost=True, lost_node=1, reason="node 1 has been silent for 30 s")
    seen = verdict(host("a", lease(0), lease(1), beat(0), beat(1), peer, age=age), silent("b"))
    assert seen.phase is phase
    if phase is Phase.LOST:
        assert (seen.cause, seen.failed_hosts) == (Cause.NODE_FAILURE, ("b",))
        assert "no answer from b (timed out)" in seen.reason
    else:
        assert "no answer from b" in seen.reason


def test_a_host_that_never_joined_may_be_waiting_for_the_others_much_longer() -> None:
    waiting = verdict(host("b", age=100.0), silent("a"))
    assert waiting.phase is Phase.UNKNOWN


def test_a_crash_beside_a_host_that_went_away_is_a_node_failure() -> None:
    seen = verdict(host("a", lease(0), lease(1), beat(1), crashed(0), age=60), silent("b"))
    assert (seen.phase, seen.cause, seen.failed_hosts) == (Phase.LOST, Cause.NODE_FAILURE, ("b",))
    assert "rank 0 on a exited with 42" in seen.reason


def test_a_killed_agent_is_a_node_failure_that_names_its_host() -> None:
    peer = ended(0, "peer", peer_lost=True, lost_node=1, reason="node 1 has gone away")
    seen = verdict(host("a", lease(0), peer), host("b", lease(1), beat(1)))
    assert (seen.phase, seen.failed_hosts) == (Phase.LOST, ("b",))
    assert seen.reason.startswith("the agent on b was killed or the host restarted")


@pytest.mark.parametrize(
    ("silence", "phase"), [(PEER_TIMEOUT_S + 14, Phase.RUNNING), (PEER_TIMEOUT_S + 16, Phase.LOST)]
)
def test_an_agent_that_is_stopped_keeps_nobody_waiting_once_the_others_have_ended(silence: float, phase: Phase) -> None:
    peer = ended(0, "peer", peer_lost=True, lost_node=1, reason="node 1 has been silent")
    seen = verdict(host("a", lease(0), peer), host("b", lease(1), beat(1), alive=True, silence=silence))
    assert seen.phase is phase
    if phase is Phase.LOST:
        assert (seen.cause, seen.failed_hosts) == (Cause.NODE_FAILURE, ("b",))
        assert seen.reason == "the agent on b is there and gives no sign: it is stopped; node 1 has been silent"


def test_an_agent_that_is_stopped_is_named_while_nobody_has_ended() -> None:
    seen = verdict(host("a", lease(0), alive=True), host("b", lease(1), alive=True, silence=100.0))
    assert (seen.phase, seen.reason) == (Phase.RUNNING, "the agent on b is there and gives no sign: it is stopped")
    alone = verdict(host("a", lease(0), alive=True, silence=100.0), host("b", lease(1), alive=True, silence=100.0))
    assert (alone.phase, alone.reason.count("it is stopped")) == (Phase.RUNNING, 2)


def test_a_node_that_others_lost_and_that_ended_by_itself_is_named() -> None:
    peer = ended(0, "peer", peer_lost=True, lost_node=1, reason="node 1 has been silent")
    cut = ended(1, "peer", peer_lost=True, lost_node=0, reason="node 0 has been silent")
    seen = verdict(host("a", lease(0), peer), host("b", lease(1), cut))
    assert (seen.phase, seen.cause) == (Phase.LOST, Cause.NODE_FAILURE)


def test_a_cancelled_attempt_is_cancelled_though_a_host_is_gone() -> None:
    done = ended(0, "cancelled", exit_status=143, reason="cancelled")
    seen = verdict(host("a", lease(0), lease(1), beat(1), done, age=100), silent("b"))
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)


def test_the_words_of_a_node_that_died_after_it_stopped_first_count() -> None:
    failure = {"rank": 1, "node": 1, "host": "internal-1", "exit_code": 9, "signal": None, "at": 119.0}
    stop = {
        "stop-r0.json": {
            "node": 1,
            "host": "x",
            "outcome": "crash",
            "reason": "r",
            "first_failure": failure,
            "at": 119.0,
        }
    }
    seen = verdict(
        host("a", lease(0), ended(0, "peer"), stop), host("b", lease(1), ended(1, "crash", first_failure=failure))
    )
    assert (seen.phase, seen.exit.first_failure.host) == (Phase.FAILED, "b")


def test_an_attempt_that_no_host_knows_any_more_is_lost() -> None:
    gone = {"there": False}
    seen = verdict(HostStatus("a", gone), HostStatus("b", gone))
    assert (seen.phase, seen.cause) == (Phase.LOST, Cause.NODE_FAILURE)
    assert "was removed" in seen.reason


def test_a_setup_that_failed_is_a_launch_failure() -> None:
    seen = verdict(
        host("a", lease(0), ended(0, "peer", reason="stopped because of node 1")),
        host("b", lease(1), ended(1, "launch", reason="setup on node 1 failed")),
    )
    assert (seen.phase, seen.cause, seen.reason) == (Phase.FAILED, Cause.LAUNCH, "setup on node 1 failed")


def test_an_elastic_job_that_went_on_without_a_host_succeeds() -> None:
    first = host("a", lease(0), lease(1), beat(1), ended(0, lost_nodes=[1]), age=100)
    seen = verdict(first, silent("b"))
    assert (seen.phase, seen.reason) == (Phase.SUCCEEDED, "it had gone on without b")
    failed = host("a", lease(0), lease(1), beat(1), crashed(0) | {}, age=100)
    record = failed.answer["records"]["node-0/exit.json"]
    record["lost_nodes"] = [1]
    assert verdict(failed, silent("b")).reason == "rank 0 on a exited with 42; it had gone on without b"
    cut = host("b", lease(1), ended(1, "peer", peer_lost=True, lost_node=0, reason="node 0 is lost"))
    assert verdict(first, cut).phase is Phase.SUCCEEDED
