"""What a job and its options cannot mean at the same time is refused, and both sides are named."""

from __future__ import annotations

from typing import Any

import pytest
from golden_plans import SNAPSHOT

from orc.launchers.backends.slurm import SlurmBackend
from orc.launchers.errors import RenderError
from orc.launchers.ids import AttemptId
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster


def render(options: dict[str, Any], *, cluster: dict[str, Any] | None = None, **resources: Any) -> str:
    values = {"root": "/shared/orc", **(cluster or {})}
    backend = SlurmBackend(Cluster(name="hpc", kind="slurm", **values))
    spec = {"name": "digits", "script": "train.py", "resources": {**resources, "options": {"slurm": options}}}
    plan = backend.render(JobSpec.model_validate(spec), SNAPSHOT, AttemptId("digits-k3f9a2", 1))
    return plan.files[1].content


@pytest.mark.parametrize(
    ("options", "resources", "words"),
    [
        ({"mem_per_cpu": "2G"}, {"memory": "16G"}, ["resources.memory", "mem_per_cpu"]),
        ({"mem_per_cpu": "2G", "mem_per_gpu": "9G"}, {"gpus_per_node": 1}, ["mem_per_cpu", "mem_per_gpu"]),
        ({"mem_per_cpu": "2G", "mem": 0}, {}, ["mem_per_cpu", "option mem "]),
        ({"mem_per_gpu": "9G"}, {}, ["mem_per_gpu = 9G", "no GPUs"]),
        ({"gpu_type": "a100"}, {}, ["gpu_type = a100", "no GPUs"]),
        ({"gres": ["gpu:2"]}, {"gpus_per_node": 2}, ["resources.gpus_per_node", "gres"]),
        ({"gres": "nvme:1,gpu:a100:2"}, {"gpus_per_node": 2}, ["resources.gpus_per_node", "gres"]),
        ({"gres": "gres/gpu:2"}, {"gpus_per_node": 2}, ["resources.gpus_per_node", "gres"]),
        ({"extra": {"tres-per-node": "gres/gpu:2"}}, {"gpus_per_node": 2}, ["--tres-per-node (under extra)"]),
        ({"nodelist": "n[1-3]", "exclude": ["n7", "n2"]}, {"nodes": 4}, ["n2 is in nodelist and in exclude"]),
        (
            {"gpus_as": "gpus-per-task"},
            {"nodes": "1:2", "gpus_per_node": 1},
            ["gpus-per-task", "resources.nodes is 1:2"],
        ),
        ({"nodelist": "n[1-3]"}, {"nodes": 2}, ["nodelist names 3 nodes", "resources.nodes is 2"]),
        ({"exclusive": True, "extra": ["--oversubscribe"]}, {}, ["exclusive and --oversubscribe"]),
        ({"container_mounts": ["/data"]}, {}, ["container_mounts is given, but no container_image"]),
    ],
)
def test_both_sides_are_named(options: dict[str, Any], resources: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RenderError) as caught:
        render(options, **resources)
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.hint


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"environment": {"container": "pytorch:2"}}, ["container_image and `environment: container`"]),
        ({"root": "~/orc", "options": {"login": "nowhere.invalid"}}, ["absolute path", "~/orc"]),
    ],
)
def test_a_container_of_slurm_needs_its_own_room(cluster: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RenderError) as caught:
        render({"container_image": "pytorch"}, cluster=cluster)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_job_s_memory_replaces_the_cluster_s_in_whichever_form() -> None:
    script = render({}, cluster={"options": {"mem-per-cpu": "2G"}}, memory="16G")
    assert [line for line in script.splitlines() if "--mem" in line] == ["#SBATCH --mem=16G"]
