"""The driver of `orc serve`: passes for all clusters at once, without an end."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
from fake_backend import FakeBackend
from hosts_testbed import eventually

from orc.launchers.backends.base import Phase
from orc.launchers.errors import LaunchError
from orc.orchestrator.client import Client
from orc.orchestrator.engine.passes import ReconcilerThreads


@pytest.fixture
def clusters(orc_home, tmp_path):
    """Two clusters, by name."""
    (orc_home / "config").mkdir(parents=True, exist_ok=True)
    (orc_home / "config" / "clusters.yaml").write_text("other: {kind: local}\n")
    return {name: FakeBackend(tmp_path / name, name=name) for name in ("local", "other")}


@pytest.fixture
def open_client(clusters):
    return lambda: Client(backend_of=clusters.__getitem__, reconciler=False)


@pytest.fixture
def open_session(open_client):
    return lambda: open_client().session


@contextmanager
def running(*drivers: ReconcilerThreads):
    stop = threading.Event()
    threads = [threading.Thread(target=driver.run, args=(stop,)) for driver in drivers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def state(client, view):
    return client.job(view.id).state


def test_a_cluster_that_hangs_keeps_no_other_waiting(clusters, open_client, open_session, job_file, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(clusters["other"], "poll", lambda _: go_on.wait(60) and {})
    driver = ReconcilerThreads(open_session, look_s=0.05)
    with open_client() as client:
        views = {name: client.submit(job_file(cluster=name)) for name in clusters}
        clusters["local"].set(views["local"].attempt.marker, Phase.SUCCEEDED)
        with running(driver):
            eventually(lambda: state(client, views["local"]) == "SUCCEEDED")
            later = client.submit(job_file())  # its cluster had no live job any more
            clusters["local"].set(later.attempt.marker, Phase.SUCCEEDED)
            eventually(lambda: state(client, later) == "SUCCEEDED")
            assert state(client, views["other"]) == "PENDING"
            assert driver.status.running
            go_on.set()
    assert not driver.status.running


def test_a_defect_of_one_cluster_is_reported_and_ends_nothing(clusters, open_client, open_session, job_file):
    clusters["other"].behave(poll="bug")
    driver = ReconcilerThreads(open_session, look_s=0.05)
    with open_client() as client:
        views = [client.submit(job_file(cluster=name)) for name in clusters]
        with running(driver):
            eventually(lambda: any(c.error for c in driver.status.clusters))
            (broken,) = [c for c in driver.status.clusters if c.error]
            assert (broken.cluster, broken.live) == ("other", 1)
            assert "KeyError" in broken.error
            clusters["other"].behave(poll=None)
            for view in views:
                clusters[view.cluster].set(view.attempt.marker, Phase.SUCCEEDED)
            eventually(lambda: [state(client, view) for view in views] == ["SUCCEEDED"] * 2)
            eventually(lambda: not any(c.error or c.live for c in driver.status.clusters))


def test_a_ledger_that_cannot_be_used_for_a_while_is_tried_again(open_client, open_session, clusters, job_file):
    refused = [LaunchError("the database is starting up")] * 3

    def hardly() -> Client:
        if refused:
            raise refused.pop()
        return open_session()

    driver = ReconcilerThreads(hardly, look_s=0.05)
    with open_client() as client:
        view = client.submit(job_file())
        clusters["local"].set(view.attempt.marker, Phase.SUCCEEDED)
        with running(driver):
            eventually(lambda: driver.status.error == "the database is starting up")
            eventually(lambda: state(client, view) == "SUCCEEDED")
            assert driver.status.error == ""


def test_two_drivers_on_one_ledger_send_each_attempt_once(open_client, open_session, clusters, job_file):
    retry = {"max_attempts": 3, "on": ["crash"], "backoff": 0}
    with open_client() as client:
        views = [client.submit(job_file(retry=retry)) for _ in range(5)]
        with running(ReconcilerThreads(open_session, look_s=0.02), ReconcilerThreads(open_session, look_s=0.02)):
            for number in (1, 2):
                for view in views:
                    clusters["local"].set(f"orc-{view.id}-a{number}", Phase.FAILED, cause="crash")
                eventually(
                    lambda: (
                        all(client.job(view.id).attempt.number == number + 1 for view in views)  # noqa: B023
                        and all(state(client, view) == "PENDING" for view in views)
                    )
                )
    assert sorted(clusters["local"].calls("submit")) == sorted(
        f"orc-{view.id}-a{number}" for view in views for number in (1, 2, 3)
    )
