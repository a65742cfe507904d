"""Pages of jobs, the events after one, and that all of it is read through indexes."""

from __future__ import annotations

import pytest

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger import store
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import InvalidCursor, JobFilter
from orc.orchestrator.views import JobRow


@pytest.fixture
def put(ledger, clock):
    """A waiting job, *at* seconds after the clock's time."""

    def put(job_id, at=0.0, **values):
        began, clock.now = clock.now, clock.now + at
        defaults = {"name": "digits", "cluster": "lab", "tags": {}}
        given = {**defaults, **values}
        with ledger.transaction() as tx:
            tags, name, cluster = given.pop("tags"), given.pop("name"), given.pop("cluster")
            tx.enqueue(NewJob(job_id, name, cluster, "fake", "job.yaml", {}, {}, tags, **given))
        clock.now = began

    return put


def walk(ledger, wanted, limit):
    """All pages, as lists of ids."""
    cursor, pages = None, []
    while True:
        page = ledger.page(wanted, cursor, limit)
        pages.append([row[0] for row in page.rows])
        cursor = page.next
        if cursor is None:
            return pages


def test_pages_go_through_all_jobs_newest_first_whatever_comes_meanwhile(ledger, put):
    for i in range(7):
        put(f"job-{i}", at=i // 3)  # several of one moment
    assert walk(ledger, JobFilter(), 3) == [["job-6", "job-5", "job-4"], ["job-3", "job-2", "job-1"], ["job-0"]]
    first = ledger.page(JobFilter(), None, 3)
    put("late", at=9)
    assert [row[0] for row in ledger.page(JobFilter(), first.next, 3).rows] == ["job-3", "job-2", "job-1"]
    assert ledger.page(JobFilter(), None, 8).next is None
    assert ledger.page(JobFilter(), None, 7).next is not None


def test_jobs_are_searched_for_once_whatever_is_read_of_those_that_are_found(ledger, put):
    put("a", tags={"t": "1"})
    put("b")
    with ledger.database.read() as connection:
        read, statements = connection.tuples, []
        connection.tuples = lambda sql, parameters=None: statements.append(sql) or read(sql, parameters)
        assert [row[0] for row in store.read_rows(connection, JobFilter(q="digits"), limit=50)] == ["b", "a"]
    assert sum("LIKE" in sql for sql in statements) == 1


def test_every_filter_chooses_and_all_have_to_hold(ledger, put):
    put("a", 1, owner="ann", project="vision", tags={"t": "1"}, group_id="g", group_index=0)
    put("b", 2, owner="bob", project="vision", name="Letters", cluster="far", group_id="g", group_index=1)
    put("c", 3, owner="ann", tags={"t": "1"}, name="50%_off!")
    with ledger.transaction() as tx:
        tx.record(tx.find("c"), Event(Kind.JOB_CANCELLED))

    def found(**values):
        return [row[0] for row in ledger.page(JobFilter(**values)).rows]

    assert found(owner="ann") == ["c", "a"]
    assert found(project="vision") == found(group="g") == ["b", "a"]
    assert found(cluster="far") == found(name="Letters") == ["b"]
    assert found(tags={"t": "1"}, owner="ann", states=["QUEUED"]) == ["a"]
    assert found(tags={"t": "1"}) == ["c", "a"]
    assert found(tags={"t": "2"}) == found(tags={"u": "1"}) == []
    assert found(states=["CANCELLED", "QUEUED", "RUNNING", "QUEUED"]) == ["c", "b", "a"]
    assert found(states=[]) == found(owner="nobody") == []
    assert found(q="LETT") == found(q="far") == found(q="Bob") == ["b"]
    assert found(q="%_OFF!") == ["c"]
    assert found(q="%") == ["c"]
    assert found(q="") == ["c", "b", "a"]
    assert walk(ledger, JobFilter(states=["QUEUED", "CANCELLED"]), 1) == [["c"], ["b"], ["a"]]


def test_ids_that_start_alike_come_newest_first_then_by_id_up_to_a_limit(ledger, put):
    put("digits-b", 1)
    put("digits-a", 1)
    put("digits-c", 2)
    put("other-digits", 3)
    assert ledger.matching_ids("digits", 5) == ["digits-c", "digits-b", "digits-a"]
    assert ledger.matching_ids("digits-", 2) == ["digits-c", "digits-b"]
    assert ledger.matching_ids("digits-a", 5) == ["digits-a"]
    assert ledger.matching_ids("DIGITS", 5) == ledger.matching_ids("%", 5) == ledger.matching_ids("digits_", 5) == []
    assert ledger.matching_ids("", 1) == ["other-digits"]


def test_a_row_tells_whose_the_job_is_and_where_it_belongs(ledger, put):
    put("a", owner="ann", project="p", priority=3, group_id="g", group_index=4, not_before=5.0, deadline_at=6.0)
    row = JobRow(*ledger.page(JobFilter()).rows[0])
    record = ledger.job("a")
    for told in (row, record):
        assert (told.owner, told.project, told.priority) == ("ann", "p", 3)
        assert (told.group_id, told.group_index, told.not_before, told.deadline_at) == ("g", 4, 5.0, 6.0)


def test_a_clock_that_is_set_back_loses_no_job_and_no_order_of_events(ledger, put, clock):
    put("before")
    clock.now -= 3600
    put("after")
    with ledger.transaction() as tx:
        tx.record(tx.find("before"), Event(Kind.JOB_CANCELLED))
    assert walk(ledger, JobFilter(), 1) == [["before"], ["after"]]
    told = [(event.job, event.kind) for event in ledger.events_after(0, 9)]
    assert told == [("before", "queued"), ("after", "queued"), ("before", "job_cancelled")]
    assert [event.kind for event in ledger.events("before")] == ["queued", "job_cancelled"]


@pytest.mark.parametrize(
    "cursor",
    ["", "x", "é", "bnVsbA", "WzEsMl0", "W10", "W251bGwsImEiXQ", store.encode_cursor(1.0, "a")[:-2], "[" * 99],
)
def test_what_no_page_has_given_is_no_cursor(ledger, cursor):
    with pytest.raises(InvalidCursor) as caught:
        ledger.page(JobFilter(), cursor)
    assert isinstance(caught.value, LaunchError)
    assert "next" in caught.value.hint


def test_events_after_one_come_in_order_up_to_a_limit_and_of_one_job(ledger, put):
    assert ledger.last_event_id() == 0
    for i in range(3):
        put(f"job-{i}")
    put("job-0-late")
    with ledger.transaction() as tx:
        tx.record(tx.find("job-0"), Event(Kind.JOB_CANCELLED))
    every = ledger.events_after(0, 100)
    assert [event.job for event in every] == ["job-0", "job-1", "job-2", "job-0-late", "job-0"]
    ids = [event.id for event in every]
    assert ids == sorted(set(ids))
    assert ledger.last_event_id() == ids[-1]
    assert ledger.events_after(ids[1], 2) == every[2:4]
    assert ledger.events_after(ids[-1], 9) == []


QUERIES = {
    "page": (JobFilter(), "ix_jobs_newest"),
    "state": (JobFilter(states=["FAILED"]), "ix_jobs_state_created_at_id"),
    "states": (JobFilter(states=["FAILED", "RUNNING"]), "ix_jobs_state_created_at_id"),
    "name": (JobFilter(name="n7"), "ix_jobs_name_created_at_id"),
    "owner": (JobFilter(owner="o7"), "ix_jobs_owner_created_at_id"),
    "cluster": (JobFilter(cluster="c7"), "ix_jobs_cluster_created_at_id"),
    "project": (JobFilter(project="p7"), "ix_jobs_project_created_at_id"),
    "group": (JobFilter(group="g7"), "ix_jobs_group_id_group_index"),
}


@pytest.fixture
def crowded(database):
    """A ledger with enough jobs that reading all of them is the worst plan."""
    with database.write() as connection:
        connection.executemany(
            "INSERT INTO jobs (id, name, cluster, backend, state, reason, attempt, revision, created_at, updated_at, "
            "owner, project, group_id, source, digests, spec) VALUES (:id, :n, :c, 'fake', :s, '', 0, 0, :at, :at, :o, "
            ":p, :g, '', '{}', '{}')",
            [
                {
                    "id": f"j{i}",
                    "n": f"n{i % 500}",
                    "c": f"c{i % 100}",
                    "s": "SUCCEEDED" if i % 100 else ("FAILED" if i % 200 else "RUNNING"),
                    "at": float(i),
                    "o": f"o{i % 100}",
                    "p": f"p{i % 100}",
                    "g": f"g{i % 500}",
                }
                for i in range(5_000)
            ],
        )
        connection.execute(
            "INSERT INTO events (job_id, at, kind, data) SELECT id, 0, 'queued', '{}' FROM jobs ORDER BY created_at"
        )
    with database.write() as connection:
        connection.execute("ANALYZE")
    return database


def plan(database, sql, parameters):
    """How the database would run the query."""
    explain = "EXPLAIN" if "postgresql" in database.url else "EXPLAIN QUERY PLAN"
    with database.read() as connection:
        return " | ".join(str(row[-1]) for row in connection.tuples(f"{explain} {sql}", parameters))


def test_lists_events_and_live_jobs_are_read_through_indexes(crowded):
    for wanted, index in QUERIES.values():
        for after in (None, (2500.0, "j2500")):
            chosen, parameters = store._chosen(wanted, after, 51)
            told = plan(crowded, f"SELECT id, name FROM {chosen}", parameters)
            assert index in told
            assert "SCAN jobs |" not in told
            assert "Seq Scan" not in told
    for sql, indexes in (
        ("SELECT id FROM events WHERE id > 7 ORDER BY id LIMIT 9", ("PRIMARY KEY", "pk_events")),
        ("SELECT id FROM events WHERE job_id = 'j9' AND id > 7 ORDER BY id LIMIT 9", ("ix_events_job_id_id",)),
        ("SELECT id FROM jobs j WHERE j.state IN ('FAILED', 'RUNNING')", ("ix_jobs_state_created_at_id",)),
        ("SELECT id FROM jobs j WHERE j.id IN ('j1', 'j2')", ("pk_jobs", "sqlite_autoindex_jobs_1")),
    ):
        told = plan(crowded, sql, {})
        assert any(index in told for index in indexes), told


def test_jobs_are_counted_by_state_and_those_that_have_not_ended_by_cluster(ledger, put):
    put("a", cluster="near", owner="ann")
    put("b", cluster="far")
    put("c", cluster="far")
    with ledger.transaction() as tx:
        tx.record(tx.find("c"), Event(Kind.JOB_CANCELLED), job_set={"ended_at": 50.0})
    assert ledger.counts(JobFilter()) == (
        {"QUEUED": 2, "CANCELLED": 1},
        {"near": {"QUEUED": 1}, "far": {"QUEUED": 1}},
    )
    assert ledger.counts(JobFilter(owner="ann")) == ({"QUEUED": 1}, {"near": {"QUEUED": 1}})
    assert ledger.counts(JobFilter(ended_since=50.0)) == ({"CANCELLED": 1}, {})
    assert [row[0] for row in ledger.page(JobFilter(ended_since=50.0)).rows] == ["c"]
    assert ledger.counts(JobFilter(ended_since=50.1)) == ({}, {})
