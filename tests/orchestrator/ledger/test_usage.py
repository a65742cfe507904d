"""What attempts have used is added up by the database, from what stands beside their times."""

from __future__ import annotations

import pytest
from counted_database import counting
from prepared_jobs import create_prepared

from orc.orchestrator.engine.usage import read_use
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob

HOUR = 3600.0


@pytest.fixture
def ran(ledger):
    """``ran(job, (begin, end), ...)`` writes a job with these attempts; one without an end still runs."""

    def write(job, *attempts, owner="ann", hosts=("n1", "n2"), resources=None, tags=None):
        resources = {
            "nodes": "3:4",
            "gpus_per_node": 4,
            "options": {"fake": {"instance_type": "big"}},
            **(resources or {}),
        }
        new = NewJob(job, job, "lab", "fake", "", {"resources": resources}, {}, tags or {}, owner=owner, project="p")
        with ledger.transaction() as tx:
            record = create_prepared(tx, new, f"orc-{job}-a1", "plan", "me", 0.0)
            for number, (begin, end) in enumerate(attempts, 1):
                if number > 1:
                    record = tx.prepare(record, f"orc-{job}-a{number}", "plan")
                started = [Event(kind, number) for kind in (Kind.SUBMITTING, Kind.ACCEPTED, Kind.RUNNING)]
                record = tx.record(record, *started, attempt_set={"started_at": begin, "hosts": list(hosts)})
                if end is not None:
                    over = (Event(Kind.FAILED, number), Event(Kind.RETRY))
                    record = tx.record(record, *over, attempt_set={"ended_at": end})

    return write


def found(ledger, by, now=100 * HOUR, **chosen):
    with ledger.database.read() as connection:
        return {use.key: use for use in read_use(connection, by, now, **chosen)}


def test_the_use_of_any_number_of_attempts_is_one_statement_and_its_rows_are_the_groups(ledger, ran):
    for number in range(20):
        ran(f"job-{number}", (0.0, HOUR), (2 * HOUR, 5 * HOUR), owner=f"user-{number % 2}")
    with counting(ledger) as counted:
        uses = found(ledger, "user")
    assert counted == {"transactions": 1, "statements": 1}
    assert {key: (use.jobs, use.attempts, use.node_s) for key, use in uses.items()} == {
        "user-0": (10, 20, 10 * 2 * 4 * HOUR),
        "user-1": (10, 20, 10 * 2 * 4 * HOUR),
    }
    assert {use[1:4] for use in uses.values()} == {("lab", 4, "big")}


def test_what_runs_counts_until_now_and_without_hosts_as_the_nodes_that_it_requests(ledger, ran):
    ran("runs", (98 * HOUR, None), hosts=())
    (use,) = found(ledger, "job").values()
    assert (use.node_s, use.running, use.ended_at) == (3 * 2 * HOUR, True, 100 * HOUR)


def test_only_the_hours_of_the_period_count_and_a_job_whose_first_attempt_was_before_it(ledger, ran):
    ran("job", (0.0, HOUR), (2 * HOUR, 10 * HOUR), (20 * HOUR, 30 * HOUR))
    use = found(ledger, "job", since=4 * HOUR, until=6 * HOUR)["job"]
    assert (use.jobs, use.attempts, use.node_s) == (1, 1, 2 * 2 * HOUR)
    assert found(ledger, "job", since=31 * HOUR) == found(ledger, "job", until=0.0) == {}
    both = found(ledger, "attempt", since=4 * HOUR)
    assert both["job"].node_s in (2 * 6 * HOUR, 2 * 10 * HOUR)


@pytest.mark.parametrize(
    ("by", "keys"), [("project", {"p"}), ("cluster", {"lab"}), ("tag:team", {"a", ""}), ("job", {"one", "two"})]
)
def test_uses_are_grouped_by_what_is_asked_for(ledger, ran, by, keys):
    ran("one", (0.0, HOUR), tags={"team": "a"})
    ran("two", (0.0, HOUR), owner="bob")
    assert set(found(ledger, by)) == keys
    assert set(found(ledger, "job", owner="bob")) == set(found(ledger, "job", job_ids=["two"])) == {"two"}
