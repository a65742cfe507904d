"""From the submission to a pod that is up, and back to nothing: against the TPU API server, without any workers.

The workers' addresses are on this machine, and nobody listens there: what needs them is shown in tests/e2e/test_tpu.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tpu_testbed import OTHER_ZONE, PROJECT, ZONE, cluster_of, no_later_than

from orc.launchers.errors import LaunchError
from orc.launchers.spec import LoadedJob, load_job
from orc.orchestrator.client import Client
from orc.orchestrator.engine import cleanup, steps

if TYPE_CHECKING:
    from fake_tpu_server import FakeTpuServer

    from orc.orchestrator.views import JobView


class Hurried:
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class Cloud:
    """orc at an API whose TPUs have no workers that anybody could log in to."""

    def __init__(self, server: FakeTpuServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.clock = Hurried()
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            self._port = closed.getsockname()[1]
        self.configure()
        self.client = Client(clock=self.clock, sleep=time.sleep)

    def configure(self, **options: Any) -> None:
        """The options of the cluster from now on."""
        made = cluster_of(self.server, port=self._port, connect_timeout=1, **options)
        config = Path(os.environ["ORC_CONFIG_DIR"])
        config.mkdir(parents=True, exist_ok=True)
        entry = {"kind": "tpu", "python": sys.executable, "options": dict(made.options)}
        (config / "clusters.yaml").write_text(yaml.safe_dump({"pod": entry}))
        if hasattr(self, "client"):
            self.client.close()
            self.client = Client(clock=self.clock, sleep=time.sleep)

    def job_file(self, **keys: Any) -> LoadedJob:
        self.directory.mkdir(exist_ok=True)
        (self.directory / "train.py").write_text("print('training')\n")
        path = self.directory / "job.yaml"
        spec = {"name": "digits", "script": "train.py", "launcher": "python", "cluster": "pod"}
        path.write_text(yaml.safe_dump({**spec, "retry": {"backoff": 0}, **keys}))
        return load_job(path)

    def submit(self, **keys: Any) -> JobView:
        return self.client.submit(self.job_file(**keys))

    def until(self, job: str, done: Callable[[JobView], Any]) -> JobView:
        """Passes until *done* says so of the job."""

        def probe() -> JobView | None:
            self.client.refresh([job])
            view = self.client.job(job)
            return view if done(view) else None

        found: JobView = no_later_than(self.server, probe)
        return found

    def fault(self, text: str) -> None:
        from fake_tpu_model import Fault

        self.server.cloud.add_fault(Fault.parse(text))

    def cancel(self, job: str) -> JobView:
        self.client.cancel([job])
        return self.until(job, lambda view: view.ended_at is not None)

    def asked(self) -> list[tuple[str, str]]:
        """Zone and id of each queued resource that was made."""
        calls = [c for c in self.server.cloud.calls if c.method == "CreateQueuedResource" and c.code == "OK"]
        return [(c.request["parent"].rpartition("/")[2], c.request["queued_resource_id"]) for c in calls]

    def is_empty(self) -> bool:
        there = self.server.cloud.summary()
        return not there["nodes"] and not there["queued_resources"]


@pytest.fixture
def cloud(tpu_api: FakeTpuServer, tmp_path: Path) -> Iterator[Cloud]:
    made = Cloud(tpu_api, tmp_path / "project")
    yield made
    made.client.close()


def is_waiting_for_workers(view: JobView) -> bool:
    return view.state == "PENDING" and "waiting for the workers" in view.reason


def test_a_submission_asks_and_returns_and_the_job_says_what_it_waits_for(cloud: Cloud) -> None:
    cloud.server.cloud.configure(capacity_chips=0)
    view = cloud.submit()
    assert view.state == "PENDING"
    assert cloud.asked() == [(ZONE, f"orc-{view.id}-a1")]
    seen = cloud.until(view.id, lambda v: "WAITING_FOR_RESOURCES" in v.reason)
    assert (seen.state, seen.reason) == ("PENDING", f"the TPU is WAITING_FOR_RESOURCES in {ZONE}")
    cloud.server.cloud.configure(capacity_chips=None)
    up = cloud.until(view.id, is_waiting_for_workers)
    assert "worker-0" in up.reason
    ended = cloud.cancel(view.id)
    assert (ended.state, ended.attempts[0].state) == ("CANCELLED", "CANCELLED")
    no_later_than(cloud.server, cloud.is_empty)
    assert len(cloud.asked()) == 1


@pytest.mark.parametrize("ends", ["up", "no capacity"])
def test_a_node_whose_creation_is_under_way_is_waited_for_and_not_made_twice(cloud: Cloud, ends: str) -> None:
    """The API lists a node only when its creation has got somewhere; until then there is an operation."""
    capacity = None if ends == "up" else 0
    cloud.server.cloud.configure(listing_delay=1.5, provision_delay=2.0, capacity_chips=capacity)
    cloud.configure(queued=False, zones=[ZONE, OTHER_ZONE])
    view = cloud.submit()
    seen = cloud.until(view.id, lambda v: v.reason)
    assert (seen.state, seen.reason) == ("PENDING", f"the TPU is CREATING in {ZONE}")
    if ends == "up":
        cloud.until(view.id, is_waiting_for_workers)
        assert [attempt.number for attempt in cloud.client.job(view.id).attempts] == [1]
    else:
        cloud.until(view.id, lambda v: OTHER_ZONE in v.reason)
    made = [c.request["parent"].rpartition("/")[2] for c in cloud.server.cloud.calls if c.method == "CreateNode"]
    assert made == ([ZONE] if ends == "up" else [ZONE, OTHER_ZONE])
    cloud.cancel(view.id)
    no_later_than(cloud.server, cloud.is_empty)


def test_polls_ask_the_zone_of_the_tpu_and_less_and_less(cloud: Cloud) -> None:
    cloud.configure(zones=[ZONE, OTHER_ZONE])
    cloud.server.cloud.configure(capacity_chips=0)
    view = cloud.submit()
    cloud.until(view.id, lambda v: "WAITING_FOR_RESOURCES" in v.reason)
    before = len(cloud.server.cloud.calls)
    for _ in range(20):
        cloud.client.refresh([view.id])
    asked = [call.request["parent"] for call in cloud.server.cloud.calls[before:]]
    assert len(asked) < 20
    assert {parent.rpartition("/")[2] for parent in asked} <= {ZONE}
    cloud.cancel(view.id)
    no_later_than(cloud.server, cloud.is_empty)


def test_a_zone_that_refuses_the_request_is_followed_by_the_next(cloud: Cloud) -> None:
    cloud.configure(zones=[ZONE, OTHER_ZONE])
    cloud.fault("CreateQueuedResource=RESOURCE_EXHAUSTED")
    view = cloud.submit()
    assert cloud.asked() == [(OTHER_ZONE, f"orc-{view.id}-a1")]
    cloud.until(view.id, is_waiting_for_workers)
    cloud.cancel(view.id)


def test_a_request_that_fails_later_is_followed_by_one_in_the_next_zone(cloud: Cloud) -> None:
    cloud.configure(zones=[ZONE, OTHER_ZONE])
    cloud.fault("op:provision-qr=RESOURCE_EXHAUSTED")
    view = cloud.submit()
    cloud.until(view.id, is_waiting_for_workers)
    assert cloud.asked() == [(ZONE, f"orc-{view.id}-a1"), (OTHER_ZONE, f"orc-{view.id}-a1")]
    assert len(cloud.client.job(view.id).attempts) == 1
    cloud.cancel(view.id)
    no_later_than(cloud.server, cloud.is_empty)  # the failed request, too


def test_where_every_zone_refuses_the_job_waits_and_asks_again(cloud: Cloud) -> None:
    cloud.configure(zones=[ZONE, OTHER_ZONE])
    cloud.fault("CreateQueuedResource=RESOURCE_EXHAUSTED:2")
    view = cloud.submit()
    assert view.state == "PREPARED"
    assert view.reason.startswith(f"waiting for a TPU: no TPU could be had: {ZONE}: ")
    assert cloud.asked() == []
    cloud.clock.ahead += 300
    cloud.until(view.id, lambda v: v.state == "PENDING")
    assert cloud.asked() == [(ZONE, f"orc-{view.id}-a1")]
    cloud.cancel(view.id)


def test_a_request_that_no_zone_will_ever_take_fails_the_job_at_once(cloud: Cloud) -> None:
    cloud.fault("CreateQueuedResource=INVALID_ARGUMENT")
    with pytest.raises(LaunchError, match="the TPU cannot be made"):
        cloud.submit()
    (row,) = cloud.client.jobs()
    assert row.state == "FAILED"
    assert cloud.is_empty()


def test_capacity_that_is_nowhere_ends_the_attempt_and_leaves_nothing(cloud: Cloud) -> None:
    cloud.configure(zones=[ZONE, OTHER_ZONE])
    cloud.fault("op:provision-qr=RESOURCE_EXHAUSTED:4")
    view = cloud.submit(retry={"max_attempts": 2, "on": ["node_failure"], "backoff": 0})
    ended = cloud.until(view.id, lambda v: v.ended_at is not None)
    assert ended.state == "FAILED"
    assert [(a.state, a.cause) for a in ended.attempts] == [("LOST", "node_failure")] * 2
    assert "no TPU could be had" in ended.reason
    no_later_than(cloud.server, cloud.is_empty)
    assert [zone for zone, _ in cloud.asked()] == [ZONE, OTHER_ZONE] * 2


def test_a_pod_that_is_preempted_is_followed_by_another(cloud: Cloud) -> None:
    view = cloud.submit()
    cloud.until(view.id, is_waiting_for_workers)
    cloud.server.cloud.preempt(f"projects/{PROJECT}/locations/{ZONE}/nodes/orc-{view.id}-a1")
    again = cloud.until(view.id, lambda v: len(v.attempts) == 2 and is_waiting_for_workers(v))
    assert [(a.state, a.cause) for a in again.attempts] == [("PREEMPTED", "preempted"), ("PENDING", None)]
    assert list(cloud.server.cloud.summary()["queued_resources"]) == [
        f"projects/{PROJECT}/locations/{ZONE}/queuedResources/orc-{view.id}-a2"
    ]
    cloud.cancel(view.id)
    no_later_than(cloud.server, cloud.is_empty)


def test_a_creation_that_hangs_is_given_up_and_cleared_away(cloud: Cloud) -> None:
    cloud.configure(provision_timeout=1)
    cloud.server.cloud.configure(provision_delay=600)
    view = cloud.submit(retry={"max_attempts": 1})
    ended = cloud.until(view.id, lambda v: v.ended_at is not None)
    assert (ended.state, ended.attempts[0].cause) == ("FAILED", "node_failure")
    assert f"the TPU is still PROVISIONING in {ZONE}" in ended.reason
    no_later_than(cloud.server, cloud.is_empty)


def test_a_granted_request_whose_node_never_comes_is_given_up_and_cleared_away(cloud: Cloud) -> None:
    cloud.configure(provision_timeout=1)
    cloud.server.cloud.configure(capacity_chips=0)
    view = cloud.submit(retry={"max_attempts": 1})
    cloud.until(view.id, lambda v: "WAITING_FOR_RESOURCES" in v.reason)
    cloud.server.cloud.activate_without_node(f"projects/{PROJECT}/locations/{ZONE}/queuedResources/orc-{view.id}-a1")
    ended = cloud.until(view.id, lambda v: v.ended_at is not None)
    assert (ended.state, ended.attempts[0].cause) == ("FAILED", "node_failure")
    assert f"the TPU is still ACTIVE in {ZONE}" in ended.reason
    no_later_than(cloud.server, cloud.is_empty)


def test_workers_that_never_let_anybody_in_are_given_up_and_cleared_away(cloud: Cloud) -> None:
    cloud.configure(boot_timeout=1)
    view = cloud.submit(retry={"max_attempts": 1})
    ended = cloud.until(view.id, lambda v: v.ended_at is not None)
    assert (ended.state, ended.attempts[0].cause) == ("FAILED", "node_failure")
    assert "the workers could not be used" in ended.reason
    no_later_than(cloud.server, cloud.is_empty)


@pytest.mark.parametrize("method", ["queued", "node"])
def test_a_deletion_that_fails_is_tried_with_every_pass_and_told(cloud: Cloud, method: str) -> None:
    cloud.configure(queued=method == "queued")
    view = cloud.submit()
    cloud.until(view.id, is_waiting_for_workers)
    # Of a node that is made at once, the operation fails that was to delete it.
    cloud.fault("DeleteQueuedResource=PERMISSION_DENIED:3" if method == "queued" else "op:delete-node=INTERNAL:3")
    cloud.client.cancel([view.id])
    told = cloud.client.job(view.id)
    assert told.state == "PENDING"
    why = "PERMISSION_DENIED" if method == "queued" else "is still there"
    assert "over (cancelled before it was started); deleting its TPU: " in told.reason
    assert why in told.reason
    ended = cloud.cancel(view.id)
    assert ended.state == "CANCELLED"
    no_later_than(cloud.server, cloud.is_empty)


def test_the_end_does_not_wait_for_ever_for_a_deletion(cloud: Cloud) -> None:
    cloud.configure(delete_timeout=1, boot_timeout=1)
    cloud.fault("DeleteQueuedResource=PERMISSION_DENIED:1000")
    view = cloud.submit(retry={"max_attempts": 1})
    ended = cloud.until(view.id, lambda v: v.ended_at is not None)
    assert ended.state == "FAILED"
    assert "NOT DONE: deleting its TPU" in ended.reason
    assert "orc prune --cluster pod" in ended.reason
    assert not cloud.is_empty()
    cloud.server.cloud.faults.clear()
    (left,) = cleanup.leftovers(cloud.client.workspace, "pod")
    assert (left.marker, left.why) == (f"orc-{view.id}-a1", "over")
    assert cleanup.sweep(cloud.client.workspace, "pod", [left]) == {}
    assert cloud.is_empty()


def test_one_bad_entry_keeps_no_other_cluster_from_being_pruned(cloud: Cloud) -> None:
    file = Path(os.environ["ORC_CONFIG_DIR"]) / "clusters.yaml"
    good = file.read_text()
    file.write_text(f"odd: {{kind: slumr}}\nother: {{kind: tpu, options: {{zones: a}}}}\n{good}")
    names, wrong = cleanup.sweepable_clusters(Client().workspace)
    assert (names, sorted(wrong)) == (["pod"], ["odd", "other"])


@pytest.mark.parametrize(
    ("options", "directory", "warned"),
    [
        ({}, None, True),
        ({}, "saved", True),
        ({"on_finish": "idle"}, None, True),
        ({"on_finish": "keep"}, None, False),
        ({}, "gs://bucket/run", False),
        ({}, "/mnt/bucket/run", False),
    ],
)
def test_checkpoints_that_would_be_deleted_with_the_tpu_are_pointed_out_before(
    cloud: Cloud, options: dict[str, Any], directory: str | None, warned: bool
) -> None:
    cloud.configure(**options)
    cloud.server.cloud.configure(capacity_chips=0)
    told: list[str] = []

    def note(stage: str, data: Any) -> None:
        if stage == "finding" and data["level"] == "warning":
            told.append(data["what"])

    checkpoint = {} if directory is None else {"checkpoint": {"dir": directory}}
    view = cloud.client.submit(cloud.job_file(**checkpoint), on_progress=note)
    assert bool([text for text in told if "deleted with it" in text]) is warned
    cloud.cancel(view.id)


def test_somebody_elses_tpu_of_that_name_is_neither_used_nor_deleted(cloud: Cloud) -> None:
    loaded = cloud.job_file()
    from google.cloud.tpu_v2.types import cloud_tpu

    client = cloud.server.client()
    parent = f"projects/{PROJECT}/locations/{ZONE}"

    def in_the_way(stage: str, _: object) -> None:
        if stage != "submit":
            return
        (row,) = cloud.client.jobs()
        client.create_node(
            parent=parent,
            node_id=f"orc-{row.id}-a1",
            node=cloud_tpu.Node(accelerator_type="v4-8", runtime_version="tpu-ubuntu2204-base"),
        )

    with pytest.raises(LaunchError, match="is not of this attempt: it lacks the label orc-marker"):
        cloud.client.submit(loaded, on_progress=in_the_way)
    assert list(cloud.server.cloud.summary()["queued_resources"]) == []
    assert len(cloud.server.cloud.summary()["nodes"]) == 1
    client.transport.close()


def test_an_api_that_does_not_answer_says_nothing_about_jobs(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    view = cloud.submit()
    cloud.until(view.id, is_waiting_for_workers)
    monkeypatch.setattr("orc.launchers.backends.tpu.client.READ_PATIENCE_S", 0.2)
    cloud.configure()
    cloud.fault("ListNodes=UNAVAILABLE:1000")
    cloud.client.refresh()
    seen = cloud.client.job(view.id)
    assert (seen.state, "the TPU API does not answer" in seen.reason) == ("PENDING", True)
    cloud.server.cloud.faults.clear()
    cloud.cancel(view.id)


def test_many_jobs_are_looked_at_with_two_listings(cloud: Cloud) -> None:
    cloud.server.cloud.configure(capacity_chips=0)
    views = [cloud.submit() for _ in range(12)]
    before = len(cloud.server.cloud.calls)
    cloud.client.refresh()
    looked = [call.method for call in cloud.server.cloud.calls[before:]]
    assert sorted(looked) == ["ListNodes", "ListQueuedResources"]
    cloud.client.cancel([view.id for view in views])
    no_later_than(cloud.server, lambda: cloud.client.refresh() and cloud.is_empty())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"runtime_version": "tpu-ubuntu2204-bas"}, "no runtime version tpu-ubuntu2204-bas"),
        ({"accelerator_type": "v3-64"}, "no accelerator type v3-64"),
    ],
)
def test_what_no_zone_has_is_said_before_anything_is_asked_for(cloud: Cloud, options: Any, says: str) -> None:
    cloud.configure(zones=[ZONE, OTHER_ZONE], **options)
    backend = cloud.client.workspace.backend("pod")
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.ids import AttemptId
    from orc.launchers.snapshot.manifest import Entry
    from orc.launchers.snapshot.scan import Bundle

    snapshot = Snapshot(Bundle.of([Entry.link("code", "a")]), Bundle.of([Entry.link("runtime", "b")]))
    plan = backend.render(cloud.job_file().spec, snapshot, AttemptId("digits-k3f9a2", 1))
    (finding,) = [one for one in backend.preflight(plan) if one.level == "error"]
    assert f"{ZONE}, {OTHER_ZONE} have no" in finding.what
    assert says in finding.what
    if "runtime_version" in options:
        assert "did you mean 'tpu-ubuntu2204-base'?" in finding.hint


# -- killed at any line


@pytest.mark.parametrize("point", steps.FAULT_POINTS)
def test_a_submission_that_is_killed_leaves_one_pod_or_none(cloud: Cloud, point: str) -> None:
    path = cloud.job_file().source_path
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "submit", str(path)]
    done = subprocess.run(argv, env={**os.environ, steps.FAULT_POINT: point}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    rows = cloud.client.jobs()
    if not rows:
        assert cloud.asked() == []
        return
    (row,) = rows
    if point in ("submitting", "submitted"):
        cloud.client.refresh()
        cloud.clock.ahead += 60  # nothing was found; that is believed after a while
    cloud.until(row.id, is_waiting_for_workers)
    assert cloud.asked() == [(ZONE, f"orc-{row.id}-a1")]
    assert cloud.cancel(row.id).state == "CANCELLED"
    no_later_than(cloud.server, cloud.is_empty)


def test_after_a_submission_that_was_cut_off_only_the_zone_that_was_asked_is_asked_again(cloud: Cloud) -> None:
    cloud.configure(zones=[ZONE, OTHER_ZONE, "us-east1-d", "asia-east1-c"])
    cloud.fault("CreateQueuedResource=RESOURCE_EXHAUSTED")  # in the first zone
    path = cloud.job_file().source_path
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "submit", str(path)]
    done = subprocess.run(argv, env={**os.environ, steps.FAULT_POINT: "submitted"}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (row,) = cloud.client.jobs()
    before = len(cloud.server.cloud.calls)
    cloud.until(row.id, is_waiting_for_workers)
    asked = [call.request for call in cloud.server.cloud.calls[before:]]
    assert {request.get("parent", request.get("name", "")).split("/")[3] for request in asked} == {OTHER_ZONE}
    cloud.cancel(row.id)
    no_later_than(cloud.server, cloud.is_empty)


@pytest.mark.parametrize("call", ["CreateQueuedResource", "ListNodes", "ListAcceleratorTypes"])
def test_a_submission_that_is_killed_within_a_call_leaves_one_pod_or_none(cloud: Cloud, call: str) -> None:
    path = cloud.job_file().source_path
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "submit", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        no_later_than(cloud.server, lambda: any(c.method == call for c in cloud.server.cloud.calls))
        process.kill()
    for row in cloud.client.jobs():
        cloud.client.refresh()
        cloud.clock.ahead += 60
        cloud.until(row.id, is_waiting_for_workers)
        assert cloud.asked() == [(ZONE, f"orc-{row.id}-a1")]
        cloud.cancel(row.id)
    no_later_than(cloud.server, cloud.is_empty)


@pytest.mark.parametrize("point", steps.PASS_POINTS)
def test_a_pass_that_is_killed_while_it_asks_in_the_next_zone_doubles_nothing(cloud: Cloud, point: str) -> None:
    cloud.configure(zones=[ZONE, OTHER_ZONE])
    cloud.fault("op:provision-qr=RESOURCE_EXHAUSTED")
    view = cloud.submit()
    no_later_than(cloud.server, lambda: "FAILED" in cloud.server.cloud.summary()["queued_resources"].values())
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "status", view.id]
    done = subprocess.run(argv, env={**os.environ, steps.FAULT_POINT: point}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    cloud.until(view.id, is_waiting_for_workers)
    assert [zone for zone, _ in cloud.asked()] == [ZONE, OTHER_ZONE]
    cloud.cancel(view.id)
    no_later_than(cloud.server, cloud.is_empty)
