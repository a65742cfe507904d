"""Jobs on a cluster whose hosts orc chooses: what is kept, for how long, and who comes first."""

from __future__ import annotations

import json

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Phase
from orc.launchers.errors import BackendUnreachable, BundleError, RenderError
from orc.orchestrator.client import Client


@pytest.fixture
def backend(tmp_path):
    return FakeBackend(tmp_path / "fake", hosts={"n1": 2, "n2": 2, "n3": 2})


@pytest.fixture
def submit(client, clock, job_file):
    def submit(nodes=1, slots=1, hosts=None, **keys):
        clock.now += 1
        options = {"ssh": {"hosts": hosts}} if hosts else {}
        resources = {"nodes": nodes, "procs_per_node": slots, "options": options}
        retry = {"max_attempts": 5, "on": ["node_failure", "crash"], "backoff": 0}
        return client.submit(job_file(resources=resources, **{"retry": retry, **keys}))

    return submit


@pytest.fixture
def held(client):
    """``{host: [marker, ...]}`` as the ledger has it."""

    def held():
        found = {}
        for reservation in client.workspace.ledger.reservations():
            found.setdefault(reservation.host, []).append(reservation.marker)
        return found

    return held


def kinds(client, view):
    return [event.kind for event in client.events(view.id)]


def test_a_job_keeps_its_hosts_from_the_moment_it_is_prepared_until_it_has_ended(client, backend, submit, held):
    view = submit(2, 2)
    marker = view.attempt.marker
    assert (view.state, view.attempt.hosts) == ("PENDING", ("n1", "n2"))
    assert held() == {"n1": [marker], "n2": [marker]}
    backend.set(marker, Phase.RUNNING)
    client.refresh()
    assert held() == {"n1": [marker], "n2": [marker]}
    assert client.jobs()[0].to_dict()["hosts"] == ["n1", "n2"]
    backend.set(marker, Phase.SUCCEEDED)
    client.refresh()
    assert (client.job(view.id).state, held()) == ("SUCCEEDED", {})
    assert client.job(view.id).attempt.hosts == ("n1", "n2")


def test_jobs_share_a_host_as_long_as_its_slots_last(submit, held):
    views = [submit(1, 1, ["n1"]) for _ in range(3)]
    assert [view.state for view in views] == ["PENDING", "PENDING", "QUEUED"]
    assert held() == {"n1": [view.attempt.marker for view in views[:2]]}


def test_a_job_without_room_is_queued_and_says_what_for_and_goes_on_when_there_is(client, submit, held, see):
    first, second = submit(2, 2), submit(2, 2)
    assert (second.state, second.attempts) == ("QUEUED", ())
    assert second.reason.startswith("waiting for room: 2 hosts with 2 free slots are needed, 1 are there (held by ")
    assert first.id in second.reason
    assert kinds(client, second) == ["queued", "waiting"]
    client.refresh()
    client.refresh()
    assert kinds(client, second) == ["queued", "waiting"]
    see(first, Phase.SUCCEEDED)
    second = client.job(second.id)
    assert (second.state, second.reason, second.attempt.hosts) == ("PENDING", "", ("n1", "n2"))
    assert set(held()) == {"n1", "n2"}


def test_a_new_job_sees_that_others_have_left_although_nobody_has_looked_since(backend, submit):
    first = submit(3, 2)
    backend.set(first.attempt.marker, Phase.SUCCEEDED)
    assert submit(3, 2).state == "PENDING"


def test_waiting_for_one_job_looks_at_those_that_are_in_its_way(client, backend, submit):
    first, second = submit(3, 2), submit(3, 2)
    backend.set(first.attempt.marker, Phase.SUCCEEDED)
    client.refresh([second.id])
    assert [client.job(view.id).state for view in (first, second)] == ["SUCCEEDED", "PENDING"]


def test_jobs_get_room_in_the_order_in_which_they_came(client, backend, submit):
    running = submit(3, 2)
    wide = submit(3, 2)
    narrow = submit(1, 1)
    backend.set(running.attempt.marker, Phase.SUCCEEDED)
    client.refresh([narrow.id])
    assert [client.job(view.id).state for view in (wide, narrow)] == ["PENDING", "QUEUED"]
    assert f"held by {wide.id}" in client.job(narrow.id).reason


def test_a_job_that_the_cluster_can_never_carry_is_refused_and_leaves_nothing(client, submit, held):
    with pytest.raises(RenderError, match="the cluster has 3"):
        submit(4)
    assert (client.jobs(), held()) == ([], {})


def test_a_queued_job_can_be_cancelled(client, backend, submit):
    submit(3, 2)
    second = submit(3, 2)
    (cancelled,) = client.cancel([second.id])
    assert (cancelled.state, cancelled.attempts) == ("CANCELLED", ())
    assert len(backend.calls("run")) == 1


def test_a_queued_job_keeps_its_secrets_until_it_has_ended(client, backend, submit, orc_home, monkeypatch, see):
    monkeypatch.setenv("TOKEN", "hunter2")
    first = submit(3, 2)
    second = submit(3, 2, secrets=["TOKEN"])
    monkeypatch.delenv("TOKEN")
    see(first, Phase.SUCCEEDED)
    marker = client.job(second.id).attempt.marker
    assert json.loads((backend.root / "jobs" / f"{marker}.json").read_text())["secrets"] == {"TOKEN": "hunter2"}


def test_a_retry_keeps_away_from_the_host_that_failed(client, submit, held, see):
    view = submit(2, 2)
    view = see(view, Phase.LOST, failed_hosts=["n2"], passes=2)
    assert [(a.state, a.hosts, a.failed_hosts) for a in view.attempts] == [
        ("LOST", ("n1", "n2"), ("n2",)),
        ("PENDING", ("n1", "n3"), ()),
    ]
    assert held() == {"n1": [view.attempt.marker], "n3": [view.attempt.marker]}
    (lost,) = [event for event in client.events(view.id) if event.kind == "lost"]
    assert lost.data["failed_hosts"] == ["n2"]


def test_nodes_that_the_agents_missed_are_blamed_by_their_place_in_the_placement(client, submit, see):
    view = submit(2, 2)
    verdict = {"succeeded": False, "cause": "node_failure", "exit_status": 1, "lost_nodes": [0]}
    see(view, Phase.FAILED, cause="node_failure", exit=verdict, passes=2)
    assert client.job(view.id).attempt.hosts == ("n2", "n3")


def test_an_elastic_job_goes_on_with_what_is_left(client, submit, see):
    view = submit("2:3", 2)
    assert view.attempt.hosts == ("n1", "n2", "n3")
    see(view, Phase.LOST, failed_hosts=["n1"], passes=2)
    assert client.job(view.id).attempt.hosts == ("n2", "n3")


def test_an_elastic_job_takes_a_host_back_with_the_attempt_after(client, backend, submit):
    view = submit("2:3", 2)
    used = []
    for ended in ({"failed_hosts": ["n1"]}, {"failed_hosts": []}, {"failed_hosts": ["n3"]}):
        used.append(client.job(view.id).attempt.hosts)
        backend.set(client.job(view.id).attempt.marker, Phase.LOST, **ended)
        client.refresh()
        client.refresh()
    used.append(client.job(view.id).attempt.hosts)
    assert used == [("n1", "n2", "n3"), ("n2", "n3"), ("n1", "n2", "n3"), ("n1", "n2")]


def test_a_host_that_failed_is_used_again_when_there_is_no_other(client, submit, see):
    view = submit(3, 2)
    see(view, Phase.LOST, failed_hosts=["n1"], passes=2)
    assert set(client.job(view.id).attempt.hosts) == {"n1", "n2", "n3"}


def test_a_crash_blames_no_host(client, submit, see):
    view = submit(2, 2)
    see(view, Phase.FAILED, cause="crash", failed_hosts=["n1"], passes=2)
    assert client.job(view.id).attempt.hosts == ("n1", "n2")


def test_a_host_that_does_not_answer_is_left_out(client, backend, job_file, submit):
    backend.behave(dead=["n1"])
    said = []
    loaded = job_file(resources={"nodes": 2, "procs_per_node": 2})
    view = client.submit(loaded, on_progress=lambda event, values: said.append((event, values)))
    assert view.attempt.hosts == ("n2", "n3")
    findings = [values for event, values in said if event == "finding"]
    assert [(f["level"], f["where"], f["what"]) for f in findings] == [
        ("warning", "n1", "n1 does not answer; other hosts are used")
    ]


def test_a_job_that_needs_a_host_that_does_not_answer_fails_and_holds_nothing(client, backend, submit, held):
    backend.behave(dead=["n1"])
    with pytest.raises(BackendUnreachable, match="n1 does not answer"):
        submit(3, 2)
    assert ([row.state for row in client.jobs()], held()) == (["FAILED"], {})


def test_a_retry_waits_for_a_host_that_does_not_answer_and_takes_others_when_it_can(client, backend, submit):
    view = submit(3, 2)
    backend.set(view.attempt.marker, Phase.FAILED, cause="crash")
    backend.behave(dead=["n3"])
    client.refresh()
    for _ in range(3):
        assert client.refresh().unreachable == {"local": "n3 does not answer"}
    assert client.job(view.id).state == "QUEUED"
    backend.behave(dead=[])
    client.refresh()
    assert client.job(view.id).state == "PENDING"


def test_a_host_that_goes_away_between_the_look_and_the_start_is_replaced(client, backend, submit, held):
    backend.behave(cut=["n2"])
    view = submit(2, 2)
    assert (view.state, view.attempt.number, view.attempt.hosts) == ("PENDING", 1, ("n1", "n3"))
    assert set(held()) == {"n1", "n3"}
    assert "placed" in kinds(client, view)


def test_a_host_that_goes_away_before_the_start_is_waited_for_where_no_other_will_do(client, backend, submit, held):
    backend.behave(cut=["n2"])
    view = submit(2, 2, ["n1", "n2"])
    assert (view.state, view.reason, held()) == ("PREPARED", "waiting for n2: no answer", {})
    for _ in range(2):
        assert client.refresh().unreachable == {"local": "no answer"}
    assert (client.job(view.id).state, held()) == ("PREPARED", {})
    backend.behave(cut=[])
    client.refresh()
    view = client.job(view.id)
    assert (view.state, view.attempt.number, view.attempt.hosts) == ("PENDING", 1, ("n1", "n2"))


def test_a_host_that_is_found_away_while_another_is_looked_for_is_waited_for(client, backend, submit, held):
    backend.behave(cut=["n2"], dead_after_cut=["n1"])
    view = submit(2, 2, ["n1", "n2"])
    assert (view.state, view.reason, held()) == ("PREPARED", "waiting for n1: n1 does not answer", {})
    backend.behave(cut=[], dead=[])
    client.refresh()
    assert client.job(view.id).state == "PENDING"


def test_hosts_that_jobs_of_another_ledger_use_are_waited_for_without_counting_an_attempt(
    client, backend, clock, submit, held
):
    backend.behave(submit="busy")
    view = submit(1, 2)
    assert (view.state, view.attempt.number, held()) == ("PREPARED", 1, {})
    assert view.reason == "waiting for room: n1 is taken (held by orc-stranger-a1)"
    sent = len(backend.calls("submit"))
    client.refresh()
    assert len(backend.calls("submit")) == sent
    for _ in range(4):
        clock.now += 76
        client.refresh()
    view = client.job(view.id)
    assert (view.state, view.attempt.number, held(), len(backend.calls("submit"))) == ("PREPARED", 1, {}, sent + 4)
    backend.behave(submit=None)
    clock.now += 76
    client.refresh()
    view = client.job(view.id)
    assert (view.state, view.attempt.number, list(held())) == ("PENDING", 1, ["n1"])


def test_a_lost_submission_is_sent_again_to_the_same_hosts(client, backend, submit, held):
    submit(1, 2, ["n1"])
    backend.behave(submit="swallowed")
    view = submit(2, 2)
    backend.behave(submit=None)
    client.refresh()
    client.refresh()
    view = client.job(view.id)
    assert (view.state, view.attempt.hosts) == ("PENDING", ("n2", "n3"))
    assert backend.calls("submit")[-2:] == [view.attempt.marker] * 2


def test_an_attempt_that_was_only_prepared_goes_to_the_hosts_that_were_kept_for_it(client, backend, submit, see):
    """What `kill -9` leaves behind between the two steps."""
    blocker = submit(1, 2, ["n1"])
    backend.behave(stage="unreachable")
    with pytest.raises(BackendUnreachable):
        submit(2, 2)
    backend.behave(stage=None)
    view = submit(2, 2)
    backend.set(view.attempt.marker, Phase.FAILED, cause="crash")
    backend.behave(stage="unreachable")
    client.refresh()
    client.refresh()
    waiting = client.job(view.id)
    assert (waiting.state, waiting.attempt.hosts) == ("PREPARED", ("n2", "n3"))
    see(blocker, Phase.SUCCEEDED)
    backend.behave(stage=None)
    client.refresh()
    again = client.job(view.id)
    assert (again.state, again.attempt.number, again.attempt.hosts) == ("PENDING", 2, ("n2", "n3"))


def test_a_host_that_cannot_take_the_snapshot_is_left_out_where_others_will_do(client, backend, submit, held):
    backend.behave(full=["n1"])
    view = submit(2, 2)
    assert (view.state, view.attempt.hosts) == ("PENDING", ("n2", "n3"))
    assert set(held()) == {"n2", "n3"}


def test_a_job_that_needs_a_host_that_cannot_take_the_snapshot_is_refused(client, backend, submit, held):
    backend.behave(full=["n1"])
    with pytest.raises(BundleError, match="no space"):
        submit(1, 2, ["n1"])
    assert held() == {}
    assert [job.state for job in client.jobs()] == ["FAILED"]


def test_an_attempt_that_waits_for_a_dead_host_does_not_keep_the_others(client, backend, submit, held):
    view = submit(3, 2)
    backend.set(view.attempt.marker, Phase.FAILED, cause="crash")
    backend.behave(stage="unreachable")
    client.refresh()
    assert (client.job(view.id).state, len(held())) == ("PREPARED", 3)
    backend.behave(stage=None, dead=["n3"])
    for _ in range(3):
        client.refresh()
    assert (client.job(view.id).state, held()) == ("PREPARED", {})
    assert kinds(client, view).count("waiting") == 1
    backend.behave(dead=[])
    client.refresh()
    assert (client.job(view.id).state, len(held())) == ("PENDING", 3)


def test_a_cluster_that_chooses_hosts_itself_is_told_which_to_avoid(orc_home, tmp_path, clock, job_file):
    backend = FakeBackend(tmp_path / "chooser", avoids=True)
    with Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep) as client:
        view = client.submit(job_file(retry={"max_attempts": 3, "on": ["node_failure"], "backoff": 0}))
        first = client.job(view.id).attempt.marker
        backend.set(first, Phase.FAILED, cause="node_failure", failed_hosts=["node7"])
        backend.behave(submit="refuse-avoid")
        client.refresh()
        view = client.job(view.id)
        assert (view.state, view.attempt.number) == ("PENDING", 2)
        assert backend.calls("submit") == [first, view.attempt.marker, view.attempt.marker]
        (released,) = [event for event in client.events(view.id) if event.kind == "released"]
        assert released.data["reason"].startswith("refused without the hosts that failed before")


def test_another_machine_leaves_a_retry_to_the_one_that_has_the_snapshot(
    client, backend, orc_home, tmp_path, clock, job_file, monkeypatch, see
):
    view = client.submit(job_file(retry={"max_attempts": 3, "on": ["crash"], "backoff": 5}))
    see(view, Phase.FAILED, cause="crash")
    clock.now += 10
    monkeypatch.setenv("ORC_LEDGER_URL", f"sqlite:///{orc_home}/state/ledger.db")
    with Client(tmp_path / "elsewhere", backend_of=lambda _: backend, clock=clock) as other:
        other.refresh()
        waiting = other.job(view.id)
    assert waiting.state == "QUEUED"
    assert f"({orc_home}/state)" in waiting.reason
    client.refresh()
    assert client.job(view.id).state == "PENDING"


def test_a_retry_that_is_due_at_once_is_made_by_the_pass_that_sees_the_end(client, submit, see):
    view = submit(1, 2)
    see(view, Phase.FAILED, cause="crash")
    assert [a.state for a in client.job(view.id).attempts] == ["FAILED", "PENDING"]


def test_a_small_job_does_not_pass_a_large_one_that_waits_for_the_same_hosts(client, submit):
    submit(1, 2)
    large = submit(3, 2)
    small = submit(1, 1)
    assert (large.state, small.state) == ("QUEUED", "QUEUED")
    assert small.reason.startswith(f"waiting for room: {large.id} is older and waits for the same hosts")
