"""Controllers that a cluster may have: Kueue, which admits all pods at once, and JobSet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes_testbed import NAMESPACE, KubernetesTestbed

from orc.launchers.backends.base import Phase
from orc.launchers.backends.kubernetes import KubernetesBackend
from orc.launchers.testing.jobs import Job, MakeJob

WAITING = """
import pathlib, os, time
print("named", os.environ.get("MASTER_ADDR"), flush=True)
while not pathlib.Path(os.environ["ORC_JOB_DIR"], "go").exists():
    time.sleep(0.05)
"""
GPUS = {"gpus_per_node": 2, "procs_per_node": 1, "options": {"kubernetes": {"queue": "team-a"}}}


@pytest.fixture(params=["Jobs", "JobSets"])
def backend_under_test(
    kubernetes_testbed: KubernetesTestbed, bare_runtime: None, request: pytest.FixtureRequest
) -> Iterator[KubernetesBackend]:
    backend = KubernetesBackend(kubernetes_testbed.cluster(jobset=request.param == "JobSets"))
    yield backend
    backend.close()


def waits_for(job: Job, reason: str) -> None:
    seen = job.until(lambda seen: seen.reason.startswith(f"waiting for Kueue: {reason}"))
    assert seen.phase is Phase.PENDING
    (queued,) = job.backend.queue([job.handle]).jobs  # type: ignore[attr-defined]
    assert (queued.state, queued.nodes) == ("Suspended", 2)
    assert reason in queued.reason


def test_a_job_waits_with_the_reason_of_kueue_and_all_its_pods_start_when_there_is_quota(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    kubernetes_testbed.cluster_.queues["team-a"] = {"nvidia.com/gpu": 3}
    job = make_job(WAITING, nodes=2, resources=GPUS).submit()
    waits_for(job, "couldn't assign flavors to pod set main: insufficient unused quota")
    assert kubernetes_testbed.pods() == []
    kubernetes_testbed.cluster_.queues["team-a"]["nvidia.com/gpu"] = 4
    for rank in (0, 1):
        job.until_log(rank, "named")
    later = make_job(WAITING, nodes=2, resources=GPUS, number=2).submit()
    flavor = "insufficient unused quota for nvidia.com/gpu in flavor default, 4 more needed"
    waits_for(later, f"couldn't assign flavors to pod set main: {flavor}")
    job.go()
    assert job.wait().phase is Phase.SUCCEEDED
    later.go()
    assert later.wait().phase is Phase.SUCCEEDED


def test_a_queue_that_is_not_there_is_named_and_the_job_can_be_cancelled(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(WAITING, nodes=2, resources=GPUS, secrets={"TOKEN": "x"}).submit()
    waits_for(job, "LocalQueue team-a doesn't exist")
    job.cancel(0)
    assert job.wait().phase is Phase.CANCELLED
    for kind in ("jobs", "jobsets", "services", "secrets", "workloads"):
        assert kubernetes_testbed.store.list(kind, NAMESPACE) == [], kind


def test_ranks_meet_by_the_name_of_the_first_pod_and_everything_goes_with_the_job(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(WAITING, nodes=2, launcher="torchrun").submit()
    name, jobset = job.plan.marker, job.backend.options.jobset  # type: ignore[attr-defined]
    job.until_log(0, f"named {name}{'-main-0' if jobset else ''}-0.{name}")
    again = job.backend.find(name)
    assert again == job.handle
    assert [each.why for each in job.backend.leftovers((), {name})] == ["over", "idle"]  # type: ignore[attr-defined]
    assert [len(job.backend.entries(job.handle))] == [2]  # type: ignore[attr-defined]
    job.go()
    assert job.wait().phase is Phase.SUCCEEDED
    kubernetes_testbed.store.delete("jobsets" if jobset else "jobs", NAMESPACE, name)
    assert [kubernetes_testbed.store.list(kind, NAMESPACE) for kind in ("jobs", "services")] == [[], []]


def test_an_attempt_is_found_and_ended_as_what_it_is_after_jobset_was_switched(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(WAITING).submit()
    job.until_log(0, "named")
    other = KubernetesBackend(kubernetes_testbed.cluster(jobset=not job.backend.options.jobset))  # type: ignore[attr-defined]
    assert other.submit(job.plan, {}) == other.find(job.plan.marker) == job.handle
    kinds = ("jobs", "jobsets")
    before = [kubernetes_testbed.store.list(kind, NAMESPACE) for kind in kinds]
    assert [len(before[0]), len(before[1])] == [1, int(job.backend.options.jobset)]  # type: ignore[attr-defined]
    assert [each.why for each in other.leftovers((), {job.plan.marker})] == ["over", "idle"]
    other.reap(job.handle)
    job.until(lambda seen: [kubernetes_testbed.store.list(kind, NAMESPACE) for kind in kinds] == [[], []])
    other.close()


def test_a_node_that_is_lost_ends_the_attempt_whoever_owns_its_pods(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(WAITING, grace=1).submit()
    job.until_log(0, "named")
    away = kubernetes_testbed.pods()[0]["spec"]["nodeName"]
    kubernetes_testbed.node_lost(away)
    seen = job.wait()
    assert (seen.phase, seen.failed_hosts) == (Phase.LOST, (away,))
