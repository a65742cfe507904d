"""Pods that share no volume: code reaches them, they meet, and what they leave is read when they are gone."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes_testbed import NAMESPACE, KubernetesTestbed

from orc.launchers.backends.base import Cause, Handle, LogSelector, Phase
from orc.launchers.backends.kubernetes import KubernetesBackend
from orc.launchers.backends.kubernetes.manifests import HOME
from orc.launchers.containers import held
from orc.launchers.containers.objects import UrlObjects
from orc.launchers.errors import BackendError
from orc.launchers.testing.jobs import MakeJob

BUCKET = "s3://records/orc"
REDUCE = """
import json, os, torch.distributed as dist, torch
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("met at", os.environ["MASTER_ADDR"], "sum", int(total), flush=True)
print("checkpoints", os.environ["ORC_CHECKPOINT_DIR"], flush=True)
print("secret", os.environ.get("TOKEN"), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SAVING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(params=["ConfigMap", "object store"])
def backend_under_test(
    kubernetes_testbed: KubernetesTestbed, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubernetesBackend]:
    given: dict[str, Any] = {}
    if request.param == "object store":
        url = request.getfixturevalue("s3_server")
        urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()
        env = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
        env |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="records")
        given = {"store": BUCKET, "env": env}
    backend = KubernetesBackend(kubernetes_testbed.cluster_without_volume(**given))
    yield backend
    backend.close()


def names(testbed: KubernetesTestbed, resource: str) -> list[str]:
    return [item["metadata"]["name"] for item in testbed.store.list(resource, NAMESPACE)]


def test_ranks_of_two_pods_meet_by_the_name_of_the_first_and_their_logs_stay(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(REDUCE, nodes=2, launcher="torchrun", secrets={"TOKEN": "geheim"}).submit()
    seen = job.wait()
    assert seen.phase is Phase.SUCCEEDED, (seen, job.all_logs())
    name = job.plan.marker
    for rank in (0, 1):
        said = job.log(rank)
        assert f"met at {name}-0.{name} sum 2\n" in said
        assert "secret geheim" in said
    assert [str(each) for each in job.backend.log_selectors(job.handle)] == list(
        map(str, (LogSelector(rank=0), LogSelector(rank=1), LogSelector(node=0), LogSelector(node=1)))
    )
    assert names(kubernetes_testbed, "secrets") == []  # the others go with the Job
    assert names(kubernetes_testbed, "services") == names(kubernetes_testbed, "configmaps") == [name]
    kubernetes_testbed.store.delete("jobs", NAMESPACE, name)
    assert names(kubernetes_testbed, "services") == names(kubernetes_testbed, "configmaps") == []
    if job.backend.options.store:  # type: ignore[attr-defined]
        assert "sum 2" in job.log(1)
        assert job.poll().phase is Phase.SUCCEEDED


def test_a_job_that_is_cancelled_saves_and_pods_that_are_evicted_were_preempted(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(SAVING, nodes=2).submit()
    for rank in (0, 1):
        job.until_log(rank, "ready")
    job.cancel(10)
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert [job.log(rank) for rank in (0, 1)] == ["ready\nsaved\n"] * 2
    name = job.plan.marker
    owners = kubernetes_testbed.store.get("configmaps", NAMESPACE, name)["metadata"]["ownerReferences"]
    assert [each["name"] for each in owners] == [name]  # what was kept for the verdict goes with the Job again
    job = make_job(SAVING, number=2).submit()
    job.until_log(0, "ready")
    kubernetes_testbed.evict(kubernetes_testbed.pods(f"orc-launch/attempt={job.plan.marker}")[0])
    assert job.wait().cause is Cause.PREEMPTED


def test_a_rank_that_fails_is_named_after_its_pods_have_ended(make_job: MakeJob) -> None:
    job = make_job("import os, sys; print('x' * 9000); sys.exit(42 if os.environ['RANK'] == '1' else 0)", nodes=2)
    seen = job.submit().wait()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert "42" in seen.reason
    assert seen.exit is not None
    assert seen.exit.complete


@pytest.mark.parametrize(
    ("image", "what"), [("missing/image:1", "cannot be pulled: failed to pull"), ("bare/scratch", '"python3"')]
)
def test_an_image_that_cannot_run_is_a_failed_launch_whose_end_is_known_after_the_job(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed, image: str, what: str
) -> None:
    job = make_job("pass", nodes=2, resources={"options": {"kubernetes": {"image": image}}}).submit()
    seen = job.wait()
    again = job.poll()
    for each in (seen, again):
        assert (each.phase, each.cause) == (Phase.FAILED, Cause.LAUNCH)
        assert what in each.reason
    job.backend.reap(job.handle)
    if image.startswith("missing"):  # its Job was deleted
        left = [names(kubernetes_testbed, kind) for kind in ("jobs", "configmaps", "services", "secrets")]
        assert left == [[], [], [], []]


def test_what_an_earlier_try_has_staged_gives_way_to_the_plan_that_is_sent(make_job: MakeJob) -> None:
    for word in ("before", "after"):
        job = make_job("import os; print(os.environ['WORD'])", job_id="again-abcdef", env={"WORD": word})
    assert job.submit().wait().phase is Phase.SUCCEEDED
    assert job.log(0) == "after\n"


def test_metrics_and_checkpoints_are_where_the_store_is(make_job: MakeJob) -> None:
    job = make_job(
        "import os, pathlib; print(os.environ['ORC_CHECKPOINT_DIR'])\n"
        "pathlib.Path(os.environ['ORC_JOB_DIR'], 'metrics.jsonl').write_text('{\"loss\": 1}')"
    ).submit()
    assert job.wait().phase is Phase.SUCCEEDED
    options = job.backend.options  # type: ignore[attr-defined]
    place = job.log(0).strip()
    spec = {"checkpoint": {"dir": None}}
    assert job.backend.checkpoint_dir(spec, job.plan.attempt.job) == place
    if options.store:
        assert place == f"{BUCKET}/jobs/{job.plan.attempt.job}/checkpoints"
        assert job.backend.read_file(job.handle, "metrics.jsonl", 1, 6) == b'"loss"'
        assert job.backend.read_file(job.handle, "metrics.jsonl", 100) == b""
    else:
        assert place.startswith(HOME)


@pytest.mark.parametrize("backend_under_test", ["ConfigMap"], indirect=True)
def test_a_pod_that_does_not_answer_says_nothing_about_its_attempt_and_one_that_may_not_be_asked_is_an_error(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(SAVING).submit()
    job.until_log(0, "ready")
    assert job.poll().phase is Phase.RUNNING
    monkeypatch.setattr(held, "ENDING_S", 0)
    server = kubernetes_testbed.server
    monkeypatch.setattr(server, "fault", lambda method, path: "500" if "/exec" in path else "")
    seen = job.poll()
    assert (seen.phase, seen.reason) == (Phase.UNKNOWN, "the API server: the server is not well")
    monkeypatch.undo()
    server.forbidden.add(("create", "pods/exec"))
    try:
        with pytest.raises(BackendError, match="cannot create resource"):
            job.poll()
    finally:
        server.forbidden.clear()
    job.cancel(10)
    assert job.wait().phase is Phase.CANCELLED


@pytest.mark.parametrize("backend_under_test", ["ConfigMap"], indirect=True)
def test_code_that_is_too_large_for_a_configmap_says_what_to_do_and_leaves_nothing(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed, tmp_path: Any
) -> None:
    (tmp_path / "workdir").mkdir()
    (tmp_path / "workdir" / "weights").write_bytes(os.urandom(1 << 20))
    with pytest.raises(BackendError, match=r"code and runtime have \d+ KiB when packed") as e:
        make_job("pass")
    assert "`store`" in e.value.hint
    assert names(kubernetes_testbed, "configmaps") == []


@pytest.mark.parametrize("backend_under_test", ["object store"], indirect=True)
def test_an_archive_that_is_gone_from_the_store_is_a_failed_launch_with_its_url(make_job: MakeJob) -> None:
    job = make_job("pass")
    pod = json.loads(job.plan.files[1].content)["spec"]["template"]["spec"]
    url = next(word for word in pod["containers"][0]["command"] if word.startswith(BUCKET))
    UrlObjects().delete(url)
    seen = job.submit().wait()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.LAUNCH)
    assert f"{url} cannot be fetched" in seen.reason


def test_what_is_rendered_says_what_is_lost_with_the_pods_and_is_what_is_sent(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job("pass", nodes=2, secrets={"TOKEN": "x"})
    lost = "go with them: there is neither `root` nor `store`"
    stored = bool(job.backend.options.store)  # type: ignore[attr-defined]
    assert [lost in command.purpose for command in job.plan.commands] == [not stored] * 4
    kinds = [json.loads(file.content)["kind"] for file in job.plan.files[1:]]
    assert kinds == ["Job", "ConfigMap", "Service", "Secret"]
    job.submit()
    posted = [(path, body) for method, path, body in kubernetes_testbed.server.requests if method == "POST"]
    sent = [body for path, body in posted if path.endswith(("/jobs", "/services"))]
    assert sent == [job.plan.files[3].content.encode(), job.plan.files[1].content.encode()]
    secret = kubernetes_testbed.store.get("secrets", NAMESPACE, job.plan.marker)
    assert sorted(secret["data"]) == ["link.json", "secrets.json"]
    assert job.wait().phase is Phase.SUCCEEDED


def test_a_job_that_waits_is_cancelled_and_nothing_of_it_is_left(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job("pass", nodes=2, resources={"gpus_per_node": 4, "procs_per_node": 1}).submit()
    job.until(lambda seen: "Insufficient" in seen.reason)
    job.cancel(0)
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    if not job.backend.options.store:  # type: ignore[attr-defined]
        assert "binaryData" not in kubernetes_testbed.store.get("configmaps", NAMESPACE, job.plan.marker)  # the code
    job.backend.reap(job.handle)
    assert [names(kubernetes_testbed, kind) for kind in ("jobs", "configmaps", "services", "secrets")] == [[]] * 4


def test_the_directory_of_a_job_that_nobody_knows_is_empty(backend_under_test: KubernetesBackend) -> None:
    handle = Handle("k8s", "kubernetes", "orc-gone-abcdef-a1", "orc-gone-abcdef-a1")
    assert backend_under_test.log_selectors(handle) == []
    assert list(backend_under_test.logs(handle, LogSelector(rank=0))) == []
    assert backend_under_test.read_file(handle, "metrics.jsonl") == b""
