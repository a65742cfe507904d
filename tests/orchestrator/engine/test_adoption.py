"""A ledger that was deleted: its jobs are found again by their directories and by what their clusters have of them."""

from __future__ import annotations

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Phase
from orc.orchestrator.client import Client
from orc.orchestrator.engine.adoption import AdoptionResult, adopt
from orc.orchestrator.engine.job_copies import unknown
from orc.orchestrator.ledger.prune import PruneRule, prune
from orc.orchestrator.ledger.records import Reservation


@pytest.fixture
def lose(orc_home, backend, clock):
    """Deletes the ledger; gives a client that makes a new one, and that sees *on* this backend."""
    opened = []

    def run(on=backend) -> Client:
        for file in (orc_home / "state").glob("ledger.db*"):
            file.unlink()
        opened.append(Client(backend_of=lambda _: on, clock=clock, sleep=clock.sleep))
        return opened[-1]

    yield run
    for client in opened:
        client.close()


def adopt_all(client: Client) -> list[AdoptionResult]:
    return [adopt(client.workspace, kept) for kept in unknown(client.workspace)]


def test_a_running_job_is_in_the_ledger_again_and_goes_on_to_its_end(client, backend, clock, job_file, lose):
    job = client.submit(job_file(tags={"team": "vision"}))
    backend.set(job.attempt.marker, Phase.RUNNING)
    clock.now += 100
    again = lose()
    assert adopt_all(again) == [AdoptionResult(job.id, "local", 1)]
    adopted = again.job(job.id)
    for same in ("name", "cluster", "backend", "tags", "spec", "digests", "source", "created_at"):
        assert getattr(adopted, same) == getattr(job, same)
    again.refresh()
    assert again.job(job.id).state == "RUNNING"
    assert adopt_all(again) == []
    backend.set(job.attempt.marker, Phase.SUCCEEDED)
    again.refresh()
    assert again.job(job.id).state == "SUCCEEDED"
    assert backend.calls("run") == [job.attempt.marker]


def test_the_attempts_before_the_last_are_known_and_are_not_looked_at_again(client, backend, job_file, lose):
    job = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0}))
    backend.set(job.attempt.marker, Phase.FAILED, cause="crash")
    client.refresh()
    again = lose()
    assert adopt_all(again) == [AdoptionResult(job.id, "local", 2)]
    assert [(a.number, a.state) for a in again.job(job.id).attempts] == [(1, "LOST"), (2, "PENDING")]


def test_a_job_that_was_cancelled_before_its_retry_is_not_run_again(client, backend, clock, job_file, lose):
    job = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 60}))
    backend.set(job.attempt.marker, Phase.FAILED, cause="crash")
    client.refresh()
    assert client.cancel([job.id])[0].state == "CANCELLED"
    again = lose()
    assert adopt_all(again) == [AdoptionResult(job.id, "local", 1)]
    for _ in range(3):
        again.refresh()
        clock.now += 100
    assert again.job(job.id).state == "CANCELLED"
    assert backend.calls("run") == [job.attempt.marker]


def test_hosts_of_an_adopted_job_are_kept_for_it(orc_home, tmp_path, clock, job_file, lose):
    backend = FakeBackend(tmp_path / "placing", hosts={"n1": 2, "n2": 2})
    with Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep) as client:
        job = client.submit(job_file(resources={"nodes": 2}))
    again = lose(backend)
    adopt_all(again)
    assert again.workspace.ledger.reservations() == [
        Reservation("local", host, job.id, 1, node, 1, clock.now) for node, host in enumerate(("n1", "n2"))
    ]


def test_a_job_of_which_its_cluster_has_nothing_or_does_not_answer_is_left(client, backend, job_file, lose):
    job = client.submit(job_file())
    backend.behave(find="unreachable")
    again = lose()
    assert adopt_all(again) == [AdoptionResult(job.id, "local", 0, "no answer while looking")]
    backend.behave(find=None)
    (backend.root / "jobs" / f"{job.attempt.marker}.json").unlink()
    assert adopt_all(again) == [AdoptionResult(job.id, "local", 0)]
    assert again.jobs() == []


def test_a_job_that_was_pruned_is_not_brought_back(client, backend, job_file, clock):
    job = client.submit(job_file())
    client.cancel([job.id])
    client.refresh()
    clock.now += 100
    client.submit(job_file())
    ledger = client.workspace.ledger
    assert prune(ledger, PruneRule(clock.now)).jobs == 1
    assert unknown(client.workspace) == []


def test_what_is_no_file_of_ours_is_passed_over(client, job_file, orc_home):
    client.submit(job_file())
    for name, content in (("a", "rubbish"), ("b", "{}"), ("c", '{"created_at": 1, "job": {"id": "../x"}}')):
        folder = orc_home / "state" / "jobs" / name
        folder.mkdir()
        (folder / "job.json").write_text(content)
    assert unknown(client.workspace) == []
