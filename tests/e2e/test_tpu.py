"""Jobs on TPU pods, from the command line: the TPU API server of the testbed, SSH hosts as workers, an object store."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import EPOCH, Orc
from hosts_testbed import eventually
from sample_traces import TracedJob
from tpu_testbed import PROJECT, ZONE, Pods

from orc.orchestrator.engine import steps

# Every command here is a process that imports Google's client library, on a machine that may be busy.
pytestmark = pytest.mark.timeout(400)

HELLO = """
import os, socket
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", socket.gethostname(), flush=True)
"""
WAITS = """
import os, pathlib, time
print("up", flush=True)
while not pathlib.Path(os.environ["ORC_JOB_DIR"], "go").exists():
    time.sleep(0.1)
"""
TWO = ("--set", "resources.nodes=2", "--set", "resources.procs_per_node=1")


@dataclass(frozen=True)
class Bucket:
    """An object store that laptop and workers reach."""

    url: str
    env: dict[str, str]
    client: Any

    def names(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket="checkpoints").get("Contents", [])
        return [entry["Key"] for entry in found]


@pytest.fixture
def bucket(tpu_pods: Pods) -> Iterator[Bucket]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="0.0.0.0", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://{tpu_pods.hosts.laptop}:{port}"
    client = boto3.client(
        "s3", region_name="us-east-1", endpoint_url=endpoint, aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="checkpoints")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    yield Bucket("s3://checkpoints/digits", {**keys, "AWS_ENDPOINT_URL": endpoint}, client)
    server.stop()


@pytest.fixture
def laptop(tpu_pods: Pods, tmp_path: Path) -> Callable[..., Orc]:
    """``laptop(on_finish="keep", ...)``: the command line, for a cluster with these options."""

    def make(**options: Any) -> Orc:
        directory = tmp_path / "job"
        directory.mkdir(exist_ok=True)
        return Orc(directory, tpu_pods.cluster(**options))

    return make


def node(job: str, attempt: int = 1) -> str:
    return f"projects/{PROJECT}/locations/{ZONE}/nodes/orc-{job}-a{attempt}"


@pytest.mark.slow
@pytest.mark.timeout(600)  # four processes import torch, scikit-learn and boto3
def test_a_training_whose_pod_is_preempted_half_way_goes_on_in_another_and_nothing_is_left(
    tpu_pods: Pods, laptop: Callable[..., Orc], bucket: Bucket
) -> None:
    orc = laptop(spot=True)
    orc.init_digits()
    # Half-way, the first attempt waits to be preempted.
    script = orc.directory / "train.py"
    save = "        accelerator.save_state()\n"
    hold = "        while epoch == 1 and os.environ['ORC_ATTEMPT'] == '1':\n            time.sleep(0.1)\n"
    text = (
        script.read_text()
        .replace(save, save + hold)
        .replace("import argparse\n", "import argparse\nimport os\nimport time\n")
    )
    assert hold in text
    script.write_text(text)
    changes = {
        "resources.nodes": 2,
        "resources.procs_per_node": 1,
        "args.epochs": 4,
        "args.batch-size": 64,
        "checkpoint.dir": bucket.url,
        "retry.backoff": 0,
        **{f"env.{name}": value for name, value in bucket.env.items()},
    }
    job = orc.submit(*(word for key, value in changes.items() for word in ("--set", f"{key}={value}")))
    assert orc.job(job)["state"] in ("PENDING", "RUNNING")
    orc.until_log(job, 0, "epoch  2/4")
    eventually(lambda: any("checkpoint_1/manifest" in name for name in bucket.names()))
    assert list(tpu_pods.nodes) == [node(job)]
    tpu_pods.api.cloud.preempt(node(job))
    orc("wait", job, timeout_s=500)
    first, second = orc.job(job)["attempts"]
    assert (first["state"], first["cause"], second["state"]) == ("PREEMPTED", "preempted", "SUCCEEDED")
    eventually(lambda: tpu_pods.is_empty)
    told = orc.log(job, 0)  # the pod is gone: what it said was brought home
    assert f"resumed from {bucket.url}" in told
    epochs = [int(number) for number in EPOCH.findall(told)]
    assert epochs[-1] == 4
    assert epochs[0] >= 2
    asked = [request["queued_resource_id"] for request in tpu_pods.calls("CreateQueuedResource")]
    assert asked == [f"orc-{job}-a1", f"orc-{job}-a2"]
    assert [host for attempt in (first, second) for host in attempt["hosts"]] == [f"worker-{n % 2}" for n in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("point", steps.PASS_POINTS)
def test_a_pass_that_is_killed_while_it_starts_the_workers_runs_nothing_twice(
    tpu_pods: Pods, laptop: Callable[..., Orc], point: str
) -> None:
    orc = laptop()
    orc.write_job(HELLO, secrets=["TOKEN"])
    orc.env["TOKEN"] = "geheim"
    job = orc.submit(*TWO)
    eventually(lambda: list(tpu_pods.nodes.values()) == ["READY"])
    with orc.start("status", job, env={steps.FAULT_POINT: point}) as killed:
        killed.communicate(timeout=240)
    assert killed.returncode == -signal.SIGKILL
    orc("wait", job)
    assert orc.log(job, 0).count("rank 0 of 2") == 1
    assert len(tpu_pods.calls("CreateQueuedResource")) == 1
    eventually(lambda: tpu_pods.is_empty)


@pytest.mark.slow
def test_a_pod_that_is_kept_for_a_while_is_entered_shown_and_pruned(tpu_pods: Pods, laptop: Callable[..., Orc]) -> None:
    orc = laptop(on_finish="idle", idle_timeout="1h")
    orc.write_job(WAITS)
    job = orc.submit(*TWO)
    orc.until_log(job, 0, "up")
    assert orc("exec", job, "--node", "1", "--", "hostname").strip() == "node2"
    for home in tpu_pods.homes(f"orc-{job}-a1"):
        (home / "orc" / "jobs" / job / "go").touch()
    orc("wait", job)
    (left,) = json.loads(orc("prune", "--cluster", "pod", "--json"))["leftovers"]
    assert (left["why"], left["done"], left["marker"]) == ("kept", "left", f"orc-{job}-a1")
    assert list(tpu_pods.nodes.values()) == ["READY"]
    assert "would be deleted" in orc("prune", "--cluster", "pod", "--kept", "--dry-run")
    assert not tpu_pods.is_empty
    assert "deleted" in orc("prune", "--cluster", "pod", "--kept")
    assert tpu_pods.is_empty
    assert orc("prune", "--cluster", "pod").strip() == "nothing is left"
    assert "up" in orc.log(job, 0)


@pytest.fixture
def mine(tpu_pods: Pods) -> str:
    """The name of a TPU with two workers that somebody has made by hand."""
    from google.cloud.tpu_v2.types import cloud_tpu

    public = tpu_pods.hosts.identity.with_suffix(".pub").read_text().strip()
    made = cloud_tpu.Node(
        accelerator_type="v4-16", runtime_version="tpu-ubuntu2204-base", metadata={"ssh-keys": f"trainer:{public}"}
    )
    api = tpu_pods.api.client()
    api.create_node(parent=f"projects/{PROJECT}/locations/{ZONE}", node_id="mine", node=made)
    api.transport.close()
    return "mine"


@pytest.mark.slow
def test_a_tpu_that_exists_is_used_by_one_job_after_the_other_and_stays(
    tpu_pods: Pods, laptop: Callable[..., Orc], mine: str
) -> None:
    orc = laptop(name=mine)
    orc.write_job(WAITS)
    first = orc.submit(*TWO)
    orc.until_log(first, 1, "up")
    orc.write_job(HELLO)
    second = orc.submit(*TWO)
    assert f"orc-{first}-a1" in orc.job(second)["reason"]
    for home in tpu_pods.homes(mine):
        (home / "orc" / "jobs" / first / "go").touch()
    orc("wait", first, second)
    assert "rank 1 of 2" in orc.log(second, 1)
    assert tpu_pods.nodes == {f"projects/{PROJECT}/locations/{ZONE}/nodes/{mine}": "READY"}
    assert tpu_pods.queued == {}
    assert orc("prune", "--cluster", "pod").strip() == "nothing is left"


@pytest.mark.slow
def test_a_worker_whose_agent_is_frozen_trains_nothing_beside_the_next_attempt(
    tpu_pods: Pods, laptop: Callable[..., Orc], mine: str, record_property: Callable[[str, object], None]
) -> None:
    """Both attempts are on one TPU, which stays: with another one, the first attempt's would be deleted before."""
    orc = laptop(name=mine, peer_timeout=4)
    job = TracedJob(orc, tpu_pods.hosts)
    broken_at = time.time()
    tpu_pods.hosts.agent(job.id, "node2").suspend()
    orc("wait", job.id)
    assert job.trained(1).keys() == job.trained(2).keys() == {"node1", "node2"}
    last, begin = job.check_one_after_the_other("node2", broken_at)
    record_property("fenced_s", round(last - broken_at, 1))
    record_property("goes_on_s", round(begin - broken_at, 1))
