"""What happens to a job reaches whoever subscribed: at least once, known by its id, without anybody waiting for it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_backend import FakeBackend
from fake_clock import Clock

from orc.launchers.backends.base import Cause, Phase
from orc.launchers.errors import SpecError
from orc.orchestrator.client import Client
from orc.orchestrator.ledger import outbox
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.notifications.delivery import MAX_TRIES, Deliverer, Report, deliver_due
from orc.orchestrator.notifications.targets import Policy, Settings


def _none(names):
    raise SpecError(f"the secret {next(iter(names))} has no value")


@pytest.fixture
def deliver(client: Client, clock: Clock) -> Callable[..., Report]:
    """Deliver what is due by the test's clock."""

    def run(settings: Settings | None = None, **options):
        found = settings or Settings()
        given = {"secrets": _none, "clock": clock, **options}
        return deliver_due(client.workspace.ledger, settings=lambda: found, **given)

    return run


def rows(client: Client) -> list[outbox.Notification]:
    with client.workspace.ledger.database.read() as connection:
        return outbox.listed(connection, limit=100)


@pytest.fixture
def failed(client, backend: FakeBackend, job_file) -> Callable[..., str]:
    """A job that has failed, with this ``notify``."""

    def make(*notify, name: str = "digits") -> str:
        job = client.submit(job_file(notify=list(notify), name=name))
        backend.set(f"orc-{job.id}-a1", Phase.FAILED, cause=Cause.CRASH, reason="rank 0 exited 3")
        client.refresh()
        return job.id

    return make


def test_every_event_that_was_asked_for_is_told_once(client, backend: FakeBackend, clock, job_file, web, deliver):
    every = ["start", "end", "failure", "requeue", "stall"]
    retry = {"max_attempts": 2, "on": ["node_failure"], "backoff": 0}
    job = client.submit(job_file(notify=[{"to": web.url, "on": every}], retry=retry))
    first, second = f"orc-{job.id}-a1", f"orc-{job.id}-a2"
    backend.set(first, Phase.RUNNING)
    client.refresh()
    for step in (1, 2):  # a stall is told once, however long it takes
        backend.set(first, Phase.RUNNING, progress={"step": step, "stall": "rank 1 is in all_reduce"})
        client.refresh()
    backend.set(first, Phase.LOST, cause=Cause.NODE_FAILURE, reason="node n1 is gone")
    client.refresh()
    clock.sleep(60)
    client.refresh()
    backend.set(second, Phase.RUNNING)
    client.refresh()
    backend.set(second, Phase.FAILED, cause=Cause.CRASH, reason="rank 0 exited 3")
    client.refresh()
    assert deliver().sent == 5
    assert sorted(body["event"] for body in web.bodies) == ["failure", "requeue", "stall", "start", "start"]
    told = {body["event"]: body for body in web.bodies}
    assert (told["failure"]["job"], told["failure"]["state"], told["failure"]["attempt"]) == (job.id, "FAILED", 2)
    assert "rank 0 exited 3" in told["failure"]["reason"]
    assert told["stall"]["reason"] == "rank 1 is in all_reduce"
    assert len(set(web.ids)) == 5
    assert deliver().sent == 0


def test_events_that_nobody_asked_for_write_nothing(client, backend, job_file, failed):
    failed({"to": "https://example.org/x", "on": ["success", "start"]})
    failed()
    assert rows(client) == []


def test_a_delivery_is_tried_again_with_longer_and_longer_pauses_and_then_given_up(client, clock, failed, web, deliver):
    job = failed(web.url)
    web.answers = [503]
    pauses = []
    while (row := rows(client)[0]).state == "due":
        clock.sleep(max(row.next_at - clock(), 0))
        deliver()
        pauses.append(rows(client)[0].next_at - clock())
    assert len(web.requests) == MAX_TRIES == rows(client)[0].tries
    assert all(later > earlier for earlier, later in itertools.pairwise(pauses[:-2]))
    assert "503" in rows(client)[0].last_error
    assert len(set(web.ids)) == 1
    web.answers = [200]
    assert client.retry_notifications(job) == 1
    assert deliver().sent == 1
    assert rows(client)[0].state == "sent"


@pytest.mark.parametrize("status", [302, 404])
def test_an_answer_that_will_not_change_ends_the_tries_and_no_redirect_is_followed(
    client, failed, web, deliver, status
):
    failed(web.url)
    web.answers = [status]
    assert len(deliver().dead) == 1
    assert len(web.requests) == 1
    assert rows(client)[0].state == "dead"
    assert str(status) in rows(client)[0].last_error


def test_a_mistake_in_the_settings_delays_and_loses_nothing(client, clock, failed, web, deliver):
    failed(web.url)

    def broken() -> Settings:
        raise SpecError("unknown key 'targtes'", where="notifications.yaml:1:1")

    report = deliver_due(client.workspace.ledger, settings=broken, clock=clock)
    assert report.again == 1
    assert "targtes" in rows(client)[0].last_error
    clock.sleep(60)
    assert deliver().sent == 1


def test_what_is_secret_about_a_target_is_in_no_error(client, failed, write_settings, deliver):
    given = write_settings(targets={"team": {"kind": "slack", "url": "${secret:TEAM_URL}"}})
    failed("team")
    url = "http://localhost:1/services/T0PSECRET/token?key=hunter22"
    deliver(given, secrets=lambda names: dict.fromkeys(names, url))
    (row,) = rows(client)
    assert row.state == "due"
    assert row.last_error
    assert "T0PSECRET" not in row.last_error + str(row.payload)
    assert "hunter22" not in row.last_error


_DELIVER = """
import sys, time
from pathlib import Path
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.notifications.delivery import deliver_due
deliver_due(Ledger(open_database(Path(sys.argv[1])), time.time))
"""


def test_a_deliverer_that_is_killed_before_it_has_marked_leaves_a_second_copy_with_the_same_id(
    client, clock, failed, web, deliver, subprocess_env
):
    failed(web.url)
    arrived, release = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        release.wait(60)

    web.hold = hold
    state_dir = str(client.workspace.state_dir)
    process = subprocess.Popen([sys.executable, "-c", _DELIVER, state_dir], env=subprocess_env)
    try:
        assert arrived.wait(60)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.wait()
        release.set()
    late = time.time() + 3600
    assert deliver(clock=lambda: time.time()).sent == 0  # it is still taken
    assert deliver(clock=lambda: late).sent == 1
    assert len(web.ids) == 2
    assert len(set(web.ids)) == 1
    assert deliver(clock=lambda: late + 3600).sent == 0


def test_two_deliverers_at_once_deliver_everything_once(client, clock, failed, web):
    for index in range(12):
        failed(web.url, name=f"job{index}")
    start = threading.Barrier(3)
    reports: list[Report] = []

    def work() -> None:
        ledger = Ledger(open_database(client.workspace.state_dir), clock)
        start.wait()
        reports.append(deliver_due(ledger, settings=Settings, clock=clock))
        ledger.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(report.sent for report in reports) == 12
    assert sorted(web.ids) == sorted(set(web.ids))
    assert len(web.ids) == 12


def test_a_target_that_does_not_answer_keeps_no_pass_waiting(client, clock, failed, web, tmp_path: Path):
    arrived, release = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        release.wait(60)

    web.hold = hold
    failed(web.url)
    state_dir = client.workspace.state_dir
    with Deliverer(lambda: Ledger(open_database(state_dir), time.time)):
        assert arrived.wait(60)
        other = failed({"to": web.url, "on": "start"}, name="other")  # a job lives and dies meanwhile
        assert client.job(other).state == "FAILED"
        assert rows(client)[0].state == "due"
        release.set()
        deadline = time.monotonic() + 60
        while rows(client)[0].state == "due" and time.monotonic() < deadline:
            time.sleep(0.02)
    assert rows(client)[0].state == "sent"


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("http://example.org/hook", "https"),
        ("https://localhost/hook", "no public address"),
        ("https://127.0.0.1:8443/", "no public address"),
        ("https://[::1]/", "no public address"),
        ("https://[::ffff:10.0.0.1]/", "no public address"),
        ("https://10.1.2.3/", "no public address"),
        ("https://169.254.169.254/latest/meta-data", "no public address"),
        ("https://100.64.0.1/", "no public address"),
        ("https://0.0.0.0/", "no public address"),
        ("https://2130706433/", "no public address"),
        ("https://[64:ff9b::a00:1]/", "no public address"),
        ("https://[64:ff9b:1::a00:1]/", "no public address"),
        ("https://[::10.0.0.1]/", "no public address"),
        ("https://[fec0::1]/", "no public address"),
        ("https://[fd00:ec2::254]/", "no public address"),
        ("https://168.63.129.16/", "no public address"),
        ("https://100.100.100.200/", "no public address"),
        ("slack:${secret:HOME}", "looks up no secrets"),
    ],
)
def test_a_service_tells_no_address_that_a_job_may_not_name(client, failed, deliver, to, why):
    failed(to)
    (dead,) = deliver(policy=Policy(service=True)).dead
    assert why in dead
    assert "is at 127.0.0.1" not in dead


def test_a_service_tells_private_hosts_that_its_administrator_lists(client, failed, web, settings, deliver):
    failed(web.url)
    assert deliver(settings(allow={"hosts": "localhost"}), policy=Policy(service=True)).sent == 1


def test_a_service_connects_to_the_address_that_it_has_looked_at(
    failed, secure_web, deliver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("orc.orchestrator.notifications.sending.is_public", lambda _: True)
    failed(secure_web.url)
    assert deliver(policy=Policy(service=True)).sent == 1
    ((headers, _),) = secure_web.requests
    assert headers["host"].startswith("localhost:")


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(client, failed, deliver, monkeypatch):
    import socket

    monkeypatch.setattr("orc.orchestrator.notifications.sending.TOTAL_S", 0.3)
    monkeypatch.setattr("orc.orchestrator.notifications.sending.STEP_S", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                while not over.wait(0.05):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return

        dripping = threading.Thread(target=drip)
        dripping.start()
        failed(f"http://127.0.0.1:{server.getsockname()[1]}/")
        report = deliver()
        over.set()
        dripping.join()
    assert report.again == 1
