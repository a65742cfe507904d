"""What a service keeps: each table through its functions, on every database."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from orc.orchestrator.engine import queueing
from orc.orchestrator.engine.queueing import Quota
from orc.orchestrator.ledger import audit, groups, outbox, polls, schedules, tokens
from orc.orchestrator.ledger.audit import AuditEntry
from orc.orchestrator.ledger.database import Conflict, LedgerError
from orc.orchestrator.ledger.groups import Dependency, GroupRecord
from orc.orchestrator.ledger.lifecycle import Event, JobState, Kind
from orc.orchestrator.ledger.polls import ClusterPoll
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.schedules import ScheduleRecord
from orc.orchestrator.ledger.tokens import TokenRecord
from orc.orchestrator.ledger.transaction import put_notification


@pytest.fixture
def opened(ledger):
    """``with opened() as connection:`` one transaction."""

    @contextmanager
    def transaction():
        with ledger.transaction() as tx:
            yield tx.connection

    return transaction


def enqueue(ledger, *job_ids, request="", **values):
    with ledger.transaction() as tx:
        for job_id in job_ids:
            tx.enqueue(NewJob(job_id, "digits", "lab", "fake", "", {}, {}, {}, **values), request=request)


def test_dependencies_come_with_the_state_of_what_they_wait_for(ledger, opened):
    enqueue(ledger, "a", "b", "c")
    wanted = [Dependency("b", "a", "success"), Dependency("c", "a", "any"), Dependency("c", "b", "failure")]
    with opened() as connection:
        groups.add_dependencies(connection, wanted)
        groups.add_dependencies(connection, [])
        assert [(one, str(state)) for one, state in groups.dependencies_of(connection)] == [
            (one, "QUEUED") for one in wanted
        ]
    with ledger.transaction() as tx:
        tx.record(tx.find("a"), Event(Kind.JOB_CANCELLED))
        tx.record(tx.find("b"), Event(Kind.JOB_CANCELLED))
    with opened() as connection:
        live = groups.dependencies_of(connection)
        assert live == [(wanted[1], JobState.CANCELLED), (wanted[2], JobState.CANCELLED)]
        assert type(live[0][1]) is JobState
        assert groups.dependencies_of(connection, ["b", "unknown"]) == [(wanted[0], JobState.CANCELLED)]
        assert groups.dependencies_of(connection, []) == []
    with pytest.raises(LedgerError), opened() as connection:
        groups.add_dependencies(connection, [wanted[0]])


def test_groups_know_their_jobs(ledger, opened):
    first = GroupRecord("g-1", "sweep", "lr", "ann", 1.0, 4, {"lr": [0.1, 0.2]})
    second = GroupRecord("g-2", "array", "x", "bob", 2.0)
    with opened() as connection:
        groups.create(connection, first)
        groups.create(connection, second)
    enqueue(ledger, "b", group_id="g-1", group_index=0)
    enqueue(ledger, "a", request="0a1b", group_id="g-1", group_index=1, owner="bob")
    enqueue(ledger, "other")
    with opened() as connection:
        assert groups.owners(connection, "g-1") == {"", "bob"}
        assert [groups.has_job_of(connection, "g-1", request) for request in ("0a1b", "2c3d")] == [True, False]
        assert groups.find(connection, "g-1") == first
        assert groups.find(connection, "none") is None
        assert groups.newest(connection, 9) == [second, first]
        assert groups.newest(connection, 1) == [second]
        assert groups.newest(connection, 1, ["sweep"]) == [first]
        assert groups.newest_ids(connection, 9, ["sweep", "array"]) == ["g-2", "g-1"]
    with ledger.transaction() as tx:
        tx.record(tx.find("b"), Event(Kind.JOB_CANCELLED))
    with opened() as connection:
        assert [groups.under_way(connection, "g-1", waiting) for waiting in ((), (JobState.QUEUED,))] == [1, 0]
        assert list(groups.counts(connection, "g-1").items()) == [("CANCELLED", 1), ("QUEUED", 1)]
    enqueue(ledger, "b-again", group_id="g-1", group_index=0)
    with opened() as connection:
        assert groups.counts(connection, "g-1") == {"QUEUED": 2}


NIGHTLY = ScheduleRecord(
    *("s-1", "nightly", "ann", "0 3 * * *", "Europe/Berlin", True, 10.0, None, None, {"name": "d"}, {"code": "c"}, "f")
)


def test_a_schedule_is_due_once_and_changed_by_one_at_a_time(opened):
    with opened() as connection:
        schedules.create(connection, NIGHTLY)
        assert schedules.find(connection, "s-1") == schedules.named(connection, "ann", "nightly") == NIGHTLY
        assert schedules.named(connection, "bob", "nightly") is None
        assert schedules.due(connection, 9.9) == []
        assert schedules.due(connection, 10.0) == [NIGHTLY]
        ran = schedules.update(connection, NIGHTLY, next_at=20.0, last_at=10.0, last_job="j", spec={"name": "e"})
        assert (ran.next_at, ran.last_at, ran.last_job, ran.spec, ran.revision) == (20.0, 10.0, "j", {"name": "e"}, 1)
        with pytest.raises(Conflict):
            schedules.update(connection, NIGHTLY, next_at=20.0)
        off = schedules.update(connection, ran, enabled=False)
        assert off.enabled is False
        assert schedules.due(connection, 99.0) == []
        assert schedules.all_schedules(connection) == [off]
        assert schedules.remove(connection, "s-1")
        assert not schedules.remove(connection, "s-1")
        schedules.create(connection, NIGHTLY)
    with pytest.raises(LedgerError), opened() as connection:
        schedules.create(connection, ScheduleRecord(**{**vars(NIGHTLY), "id": "s-2"}))


def test_one_owner_at_a_time_polls_a_cluster(opened):
    with opened() as connection:
        assert polls.find(connection, "lab") is None
        assert polls.take_lease(connection, "lab", "me", 100.0, 30.0)
        assert polls.take_lease(connection, "lab", "me", 101.0, 30.0), "mine already"
        assert not polls.take_lease(connection, "lab", "you", 130.9, 30.0)
        assert polls.take_lease(connection, "far", "you", 101.0, 30.0)
        assert not polls.record(connection, ClusterPoll("lab", next_at=1.0), "you")
        seen = ClusterPoll("lab", None, None, 105.0, 4.0, 101.0, 99.0, "silent")
        assert polls.record(connection, seen, "me")
        assert polls.find(connection, "lab") == seen
        assert polls.take_lease(connection, "lab", "you", 102.0, 30.0)
        polls.release(connection, "lab", "me")
        assert not polls.take_lease(connection, "lab", "me", 103.0, 30.0)
        polls.release(connection, "lab", "you")
        assert [poll.cluster for poll in polls.all_polls(connection)] == ["far", "lab"]
        assert polls.take_lease(connection, "far", "me", 131.0, 30.0), "its owner is late"
        for account, at, error in (("ann", 290.0, "refused"), ("bob", 310.0, None), ("eve", 1.0, "gone for long")):
            assert polls.take_lease(connection, "lab", "you", at, 30.0, account)
            assert polls.record(connection, ClusterPoll("lab", polled_at=at, error=error, account=account), "you")
        (_, lab) = polls.by_cluster(connection)
        assert (lab.account, lab.polled_at, lab.error) == ("bob", 310.0, "ann: refused")


def test_a_clock_that_is_set_back_does_not_keep_a_cluster_from_being_polled(opened):
    with opened() as connection:
        assert polls.take_lease(connection, "lab", "you", 1e6, 30.0)
        assert not polls.take_lease(connection, "lab", "me", 1e6 - 10, 30.0)
        assert polls.take_lease(connection, "lab", "me", 1e6 - 86400, 30.0)


def test_a_token_is_known_by_its_hash_alone_until_it_ends(opened):
    token = TokenRecord("t-1", "ann", "user", "laptop", 10.0, 20.0)
    with opened() as connection:
        tokens.create(connection, token, "h1")
        tokens.create(connection, TokenRecord("t-2", "bob", "admin", "", 11.0), "h2")
        assert tokens.find(connection, "h1") == token
        assert tokens.find(connection, "t-1") is None
        assert token.valid(19.9)
        assert not token.valid(20.0)
        tokens.note_used(connection, "t-1", 15.0)
        assert tokens.revoke(connection, "t-1", 16.0)
        assert not tokens.revoke(connection, "t-1", 17.0)
        assert not tokens.revoke(connection, "none", 17.0)
        found = tokens.find(connection, "h1")
        assert (found.last_used_at, found.revoked_at, found.valid(17.0)) == (15.0, 16.0, False)
        assert [one.id for one in tokens.all_tokens(connection)] == ["t-2", "t-1"]
        assert tokens.all_tokens(connection)[0].valid(1e12)
    with pytest.raises(LedgerError), opened() as connection:
        tokens.create(connection, TokenRecord("t-3", "eve", "admin", "", 12.0), "h2")


def test_the_audit_log_is_read_backwards_by_pages_and_never_changed(opened):
    with opened() as connection:
        for i in range(4):
            user = "ann" if i % 2 else "bob"
            audit.append(connection, at=float(i), user=user, action="cancel", subject=f"j-{i}", data={"grace_s": i})
        audit.append(connection, at=9.0, user="ann", action="login", token_id="t-1", address="10.0.0.1")
        newest = audit.page(connection, 2)
        assert [entry.at for entry in newest] == [9.0, 3.0]
        assert newest[0] == AuditEntry(newest[0].id, 9.0, "ann", "t-1", "10.0.0.1", "login", "", {})
        assert newest[1].to_dict()["data"] == {"grace_s": 3}
        assert [entry.subject for entry in audit.page(connection, 9, newest[1].id)] == ["j-2", "j-1", "j-0"]
        assert [entry.subject for entry in audit.page(connection, 9, newest[1].id, user="ann")] == ["j-1"]
        assert audit.page(connection, 9, user="eve") == []
    for statement in ("DELETE FROM audit", "UPDATE audit SET username = 'eve'"):
        with pytest.raises(LedgerError, match="the audit log is append-only"), opened() as connection:
            connection.execute(statement)


def put(connection, event, target="hook", now=10.0):
    put_notification(connection, event, "j", target, "end", {"n": event}, now)


def test_a_notification_is_stored_once_taken_by_one_and_sent_again_until_it_is_dead(opened):
    with opened() as connection:
        put(connection, 1)
        put(connection, 1, now=5.0)
        put(connection, 1, "mail", 11.0)
        put(connection, 2, now=12.0)
        assert [(one.event_id, one.target) for one in outbox.due(connection, 11.0, 9)] == [(1, "hook"), (1, "mail")]
        (first,) = outbox.due(connection, 20.0, 1)
        assert (first.payload, first.tries, first.last_error) == ({"n": 1}, 0, "")
        assert outbox.take(connection, first, until=50.0)
        assert not outbox.take(connection, first, until=50.0), "another was faster"
        assert [one.target for one in outbox.due(connection, 49.0, 9)] == ["mail", "hook"]
        outbox.failed(connection, first.id, "refused", 60.0)
        assert outbox.due(connection, 59.0, 9)[-1].event_id == 2
        again = outbox.due(connection, 60.0, 9)[-1]
        assert (again.id, again.tries, again.last_error, again.next_at) == (first.id, 1, "refused", 60.0)
        outbox.failed(connection, first.id, "gone", None)
        (mail,) = [one for one in outbox.due(connection, 60.0, 9) if one.target == "mail"]
        outbox.sent(connection, mail.id)
        assert outbox.counts(connection) == {"dead": 1, "sent": 1, "due": 1}
        assert [(one.state, one.last_error) for one in outbox.listed(connection, job_id="j", limit=9)] == [
            ("due", ""),
            ("sent", ""),
            ("dead", "gone"),
        ]
        assert outbox.listed(connection, job_id="other", limit=9) == []


def test_quotas_are_replaced_and_removed(opened):
    with opened() as connection:
        queueing.put_quota(connection, Quota("user", "ann", "gpus", 4))
        queueing.put_quota(connection, Quota("project", "vision", "cost", 99.5))
        queueing.put_quota(connection, Quota("user", "ann", "gpus", 8))
        assert queueing.all_quotas(connection) == [("project", "vision", "cost", 99.5), ("user", "ann", "gpus", 8)]
        assert queueing.remove_quota(connection, "user", "ann", "gpus")
        assert not queueing.remove_quota(connection, "user", "ann", "gpus")
        assert len(queueing.all_quotas(connection)) == 1


def test_encrypted_secrets_are_forgotten_with_the_end_of_their_job(ledger):
    query = "SELECT job_id, sealed FROM sealed_secrets"
    with ledger.transaction() as tx:
        jobs = [tx.enqueue(NewJob(name, name, "gpu", "fake", "", {}, {}, {}), ciphertext=f"of {name}") for name in "ab"]
        assert sorted(tx.connection.tuples(query)) == [("a", "of a"), ("b", "of b")]
        tx.record(jobs[0], Event(Kind.JOB_CANCELLED))
        assert tx.connection.tuples(query) == [("b", "of b")]
