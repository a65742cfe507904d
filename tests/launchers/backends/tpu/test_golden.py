"""The plans for TPUs, byte for byte. ``ORC_UPDATE_GOLDEN=1`` writes them anew; read the diff before a commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_plans import SNAPSHOT, compare

from orc.launchers.backends.ssh.rendering import hosts_of
from orc.launchers.backends.tpu import TpuBackend
from orc.launchers.backends.tpu.request import API, TpuLocation, read_requests, tpu_id
from orc.launchers.backends.tpu.workers import Worker, Workers, on_workers
from orc.launchers.errors import RenderError
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

Make = Callable[..., Cluster]
EVERYTHING: dict[str, Any] = {
    "zones": ["us-central2-b", "europe-west4-a"],
    "runtime_version": "v2-alpha-tpuv6e",
    "accelerator_type": "v6e",
    "spot": True,
    "valid_until": "6h",
    "network": "projects/demo-project/global/networks/ml",
    "subnetwork": "projects/demo-project/regions/us-central2/subnetworks/ml",
    "external_ips": False,
    "tags": ["ssh"],
    "labels": {"team": "vision", "cost-center": "1234"},
    "metadata": {"serial-port-logging-enable": "TRUE"},
    "startup_script": "#!/bin/sh\napt-get install -y gcsfuse\n",
    "data_disks": [{"source": "projects/demo-project/zones/us-central2-b/disks/data", "mode": "read_only"}],
    "service_account": {"email": "tpu@demo-project.iam.gserviceaccount.com"},
    "on_finish": "idle",
    "idle_timeout": "45m",
    "user": "me",
    "peer_timeout": 20,
}
# Options of the cluster, and the job.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smallest": ({}, {"script": "train.py"}),
    "every-option": (
        EVERYTHING,
        {
            "script": "train.py",
            "resources": {"nodes": 4, "procs_per_node": 4, "time": "1:30:00"},
            "secrets": ["WANDB_API_KEY"],
        },
    ),
    "node-at-once": (
        {"queued": False, "reserved": True, "os_login": True, "on_finish": "keep"},
        {"script": "train.py", "launcher": "python"},
    ),
    "reservation": (
        {"reservation": "projects/demo-project/locations/us-central2-b/reservations/r"},
        {"script": "t.py"},
    ),
    "reserved": ({"reserved": True}, {"script": "t.py"}),
    "one-process-per-chip": ({"accelerator_type": "v6e"}, {"script": "t.py", "launcher": "xla"}),
    "existing": ({"name": "my-tpu"}, {"script": "train.py"}),
}


def render(cluster: Cluster, number: int = 1, job_id: str = "digits-k3f9a2", **spec: Any) -> Plan:
    job = JobSpec.model_validate({"name": "digits", **spec})
    return TpuBackend(cluster).render(job, SNAPSHOT, AttemptId(job_id, number))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_is_what_its_golden_file_says(shape: str, cluster: Make, tmp_path: Path) -> None:
    options, spec = SHAPES[shape]
    if "user" in options:
        key = tmp_path / "key"
        key.with_suffix(".pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me@laptop\n")
        options = {**options, "ssh_key": str(key)}
    plan = render(cluster(**options), **spec)
    assert str(tmp_path) not in json.dumps(plan.to_dict())
    compare(f"tpu/{shape}.json", plan)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_requests_are_messages_of_the_api(shape: str, cluster: Make) -> None:
    from google.cloud.tpu_v2.types import cloud_tpu

    options, spec = SHAPES[shape]
    for request in read_requests(render(cluster(**options), **spec)).get("requests", ()):
        kind = cloud_tpu.CreateQueuedResourceRequest if "queued_resource" in request else cloud_tpu.CreateNodeRequest
        sent = kind.from_json(json.dumps(request))
        assert sent.parent == request["parent"]


def test_every_attempt_asks_under_a_name_of_its_own_and_the_same_each_time(cluster: Make) -> None:
    first, again, second = (read_requests(render(cluster(), n, script="t.py"))["requests"][0] for n in (1, 1, 2))
    assert first == again
    assert (first["queued_resource_id"], second["queued_resource_id"]) == (
        "orc-digits-k3f9a2-a1",
        "orc-digits-k3f9a2-a2",
    )
    assert first["request_id"] != second["request_id"]


def test_a_marker_that_is_too_long_for_the_api_is_shortened_and_stays_unique() -> None:
    long = [AttemptId("a" * 61, n).marker for n in (1, 2)]
    names = [tpu_id(marker) for marker in long]
    assert all(len(name) <= 63 for name in names)
    assert len(set(names)) == 2
    assert tpu_id("orc-digits-k3f9a2-a1") == "orc-digits-k3f9a2-a1"


def test_nodes_are_the_workers_of_the_type(cluster: Make) -> None:
    assert hosts_of(render(cluster(accelerator_type="v4-32"), script="t.py")) == tuple(f"worker-{n}" for n in range(4))
    plan = render(cluster(accelerator_type="v4"), script="t.py", resources={"nodes": 2})
    assert read_requests(plan)["accelerator_type"] == "v4-16"
    assert json.loads(plan.files[1].content)["nnodes"] == 2


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"nodes": 3}, "v4-16 has 2 worker machines, and the job asks for 3 nodes"),
        ({"nodes": "1:2"}, "a TPU has a fixed number of worker machines"),
        ({"gpus_per_node": 1}, "TPUs have no GPUs"),
    ],
)
def test_what_no_tpu_can_carry_is_refused(cluster: Make, resources: dict[str, Any], says: str) -> None:
    with pytest.raises(RenderError, match=says):
        render(cluster(), script="t.py", resources=resources)


XLA_ON_HOSTS = {"kind": "xla", "options": {"processes": "host"}}


@pytest.mark.parametrize(
    ("accelerator_type", "launcher", "resources", "nproc"),
    [
        ("v4-8", "xla", {}, 4),
        ("v4-32", "xla", {}, 4),
        ("v5e-8", "xla", {}, 8),
        ("v6e-1", "xla", {}, 1),
        ("v4", "xla", {"nodes": 2}, 4),
        ("v4-32", "xla", {"procs_per_node": 4}, 4),
        ("v4-8", "xla", {"procs_per_node": 1}, 1),  # one of its chips
        ("v3-8", XLA_ON_HOSTS, {}, 1),
        ("v4-32", XLA_ON_HOSTS, {}, 1),
        ("v4-8", {"kind": "xla", "options": {"device": "CPU"}}, {}, 1),
        ("v4-32", "torchrun", {}, 1),
        ("v4-32", "torchrun", {"procs_per_node": 3}, 3),
    ],
)
def test_with_xla_there_is_a_process_for_each_chip_unless_the_job_says_otherwise(
    cluster: Make, accelerator_type: str, launcher: Any, resources: dict[str, Any], nproc: int
) -> None:
    plan = render(cluster(accelerator_type=accelerator_type), script="t.py", launcher=launcher, resources=resources)
    config = json.loads(plan.files[1].content)
    assert config["nproc"] == nproc
    assert config["slots"]["take"] == nproc


@pytest.mark.parametrize(
    ("accelerator_type", "resources", "says"),
    [
        ("v4-8", {"procs_per_node": 2}, "a machine of v4-8 has 4 chips, and torch_xla uses all of them"),
        ("v4-32", {"procs_per_node": 1}, "a machine of v4-32 has 4 chips"),
        ("v2-8", {}, "a chip of v2-8 is two devices"),
        ("v3-32", {"procs_per_node": 4}, "a chip of v3-32 is two devices"),
    ],
)
def test_a_number_of_processes_that_torch_xla_cannot_work_with_is_refused(
    cluster: Make, accelerator_type: str, resources: dict[str, Any], says: str
) -> None:
    with pytest.raises(RenderError, match=says) as caught:
        render(cluster(accelerator_type=accelerator_type), script="t.py", launcher="xla", resources=resources)
    assert caught.value.hint


def test_a_disk_is_written_by_one_machine_alone(cluster: Make) -> None:
    disk = {"source": "projects/p/zones/us-central2-b/disks/d", "mode": "read_write"}
    plan = render(cluster(accelerator_type="v4-8", data_disks=[disk]), script="t.py")
    node = read_requests(plan)["requests"][0]["queued_resource"]["tpu"]["node_spec"][0]["node"]
    assert node["data_disks"] == [{"source_disk": disk["source"], "mode": "READ_WRITE"}]
    with pytest.raises(RenderError, match="v4-16 has 2 machines: only one can write"):
        render(cluster(data_disks=[disk]), script="t.py")


def test_on_the_workers_the_plan_has_their_addresses_and_nothing_of_the_request(cluster: Make) -> None:
    plan = render(cluster(), script="t.py")
    machines = (Worker("worker-0", "34.1.2.3", "10.0.0.2"), Worker("worker-1", "34.1.2.4", "10.0.0.3"))
    made = on_workers(plan, Workers(machines, "/tmp/ssh_config"))
    (file,) = made.files
    assert [host["address"] for host in json.loads(file.content)["hosts"]] == ["10.0.0.2", "10.0.0.3"]
    assert API not in {f.host for f in made.files}
    assert made.commands == plan.commands


def test_a_place_tells_whose_tpu_it_is(cluster: Make) -> None:
    own = TpuLocation.parse(read_requests(render(cluster(), script="t.py"))["place"])
    named = TpuLocation.parse(read_requests(render(cluster(name="my-tpu"), script="t.py"))["place"])
    assert own.is_made_for("orc-digits-k3f9a2-a1")
    assert not named.is_made_for("orc-digits-k3f9a2-a1")


def test_rendering_needs_neither_google_nor_grpc_nor_ssh(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: small\nscript: train.py\ncluster: pod\n")
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "clusters.yaml").write_text(
        "pod:\n  kind: tpu\n  options: {project: demo-project, zones: us-central2-b, accelerator_type: v4-32}\n"
    )
    program = (
        "import sys; from orc.orchestrator.cli.main import main; assert main(['render', 'job.yaml']) == 0; "
        "print([m for m in ('google.api_core', 'google.cloud', 'grpc', 'paramiko', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "ORC_CLUSTERS": str(tmp_path / "clusters.yaml")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "orc-small-000000-a1" in done.stdout
