"""One job on several sorts of nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from orc.launchers.backends.base import Phase
from orc.launchers.backends.slurm import submission
from orc.launchers.backends.slurm.options import read_options
from orc.launchers.backends.slurm.script import components
from orc.launchers.errors import BackendError, RenderError, SpecError
from orc.launchers.spec import JobSpec


def parts(given: list[Mapping[str, Any]], slurm: Mapping[str, Any] | None = None, **resources: Any) -> list[Any]:
    options = read_options({}, {**(slurm or {}), "heterogeneous": given})
    job = JobSpec.model_validate({"name": "t", "script": "a.py", "resources": resources})
    return components(job, options)


def test_components_have_what_is_theirs_and_the_rest_from_the_job() -> None:
    (cpu, cpu_options), (gpu, gpu_options) = parts(
        [
            {"partition": "cpu", "memory": "4G"},
            {"nodes": 2, "partition": "gpu", "gpus_per_node": 2, "mem_per_cpu": "1G"},
        ],
        {"account": "research"},
        nodes=3,
        procs_per_node=2,
        memory="8G",
    )
    assert (cpu.resources.nodes, cpu.resources.memory, cpu.resources.gpus_per_node) == (1, "4G", 0)
    assert (gpu.resources.nodes, gpu.resources.memory, gpu.resources.gpus_per_node) == (2, None, 2)
    assert (cpu.resources.nproc, gpu.resources.nproc) == (2, 2)
    assert (cpu_options.partition, gpu_options.partition) == ("cpu", "gpu")
    assert (cpu_options.account, gpu_options.account) == ("research", "research")
    assert (cpu_options.mem_per_cpu, gpu_options.mem_per_cpu) == (None, "1G")


def test_a_component_without_gpus_needs_no_type_of_them() -> None:
    (_, cpu), (_, gpu) = parts([{"gpus_per_node": 0}, {}], {"gpu_type": "a100"}, nodes=2, gpus_per_node=4)
    assert (cpu.gpu_type, gpu.gpu_type) == (None, "a100")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"nodes": 1}], "a list of two components or more"),
        ("gpu", "a list of two components or more"),
        ([{"nodes": 1}, {"nodes": 0}], r"heterogeneous\[1\].nodes: must be at least 1, not 0"),
        ([{"nodes": "1:2"}, {}], r"heterogeneous\[0\].nodes: expected a whole number, not '1:2'"),
        ([{"partitoin": "cpu"}, {}], r"heterogeneous\[0\]: unknown key 'partitoin', did you mean 'partition'"),
        ([{"procs_per_node": 2}, {}], "procs_per_node is the same on all nodes"),
        ([{"partition": "a b"}, {}], r"heterogeneous\[0\].partition: 'a b' must not contain blanks"),
    ],
)
def test_what_is_no_component_is_refused(given: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read_options({}, {"heterogeneous": given})


@pytest.mark.parametrize(
    ("given", "resources", "said"),
    [
        ([{}, {"nodes": 2}], {"nodes": 2}, "resources.nodes = 2, and the components .* have 1 \\+ 2 = 3 nodes"),
        ([{}, {"nodes": 2}], {"nodes": "2:3"}, "resources.nodes = 2:3, and the components"),
        ([{}, {"memory": "lots"}], {"nodes": 2}, "heterogeneous: component 1: memory: "),
    ],
)
def test_components_that_do_not_make_up_the_job_are_refused(given: Any, resources: Any, said: str) -> None:
    with pytest.raises(RenderError, match=said):
        parts(given, **resources)


def test_heterogeneous_jobs_make_no_array(plan_of) -> None:
    plan = plan_of(resources={"nodes": 2, "options": {"slurm": {"heterogeneous": [{}, {}]}}})
    with pytest.raises(BackendError, match="Slurm makes no arrays of heterogeneous jobs"):
        submission.check_alike([plan])


SCRIPT = """
import os, socket, time
gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
numbers = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "ORC_NODE_RANK")]
print(*numbers, socket.gethostname(), len(gpus), flush=True)
while not os.path.exists(os.environ["ORC_JOB_DIR"] + "/go"):
    time.sleep(0.1)
"""
SORTS = [
    {"partition": "cpu", "nodelist": "node2"},
    {"nodes": 2, "partition": "gpu", "gpus_per_node": 2, "gpu_type": "a100"},
]


def test_the_ranks_of_all_components_are_one_job(runs) -> None:
    resources = {"nodes": 3, "procs_per_node": 2, "options": {"slurm": {"heterogeneous": SORTS}}}
    run = runs.start(SCRIPT, resources=resources)
    for rank in range(6):
        run.until_said("\n", rank=rank)
    hosts = ("node2", "node3", "node4")
    assert [run.log(rank).split() for rank in range(6)] == [
        [str(rank), "6", str(rank // 2), hosts[rank // 2], "2" if rank > 1 else "0"] for rank in range(6)
    ]
    assert (run.poll().phase, run.poll().hosts) == (Phase.RUNNING, hosts)
    assert run.backend.find(run.plan.marker).native_id == run.handle.native_id
    assert [job.native_id for job in run.backend.queue([run.handle]).jobs] == [run.handle.native_id]
    for node, entry in enumerate(run.backend.entries(run.handle)):
        entered = subprocess.run(entry.argv(["hostname"]), capture_output=True, text=True, env=runs.slurm.env())
        assert entered.stdout.strip() == hosts[node], entered.stderr
    (run.directory.parent / "go").touch()
    seen = run.ended()
    assert seen.phase is Phase.SUCCEEDED, run.everything()
    assert sorted(seen.exit.ranks) == list(range(6))


def test_a_heterogeneous_job_is_cancelled_as_a_whole(runs) -> None:
    run = runs.start(SCRIPT, resources={"nodes": 3, "options": {"slurm": {"heterogeneous": SORTS}}})
    run.until_said("\n", rank=2)
    run.cancel(20)
    assert run.ended().phase is Phase.CANCELLED
    assert sorted(run.poll().exit.ranks) == [0, 1, 2]


def test_preflight_looks_at_every_component(runs) -> None:
    sorts = [{"partition": "cpu"}, {"nodes": 3, "partition": "gpu"}, {"partition": "nope"}]
    run = runs.prepare(SCRIPT, resources={"nodes": 5, "options": {"slurm": {"heterogeneous": sorts}}})
    errors = [finding.what for finding in run.backend.preflight(run.plan) if finding.level == "error"]
    assert errors == ["the job asks for 3 nodes, partition gpu has 2", "no partition 'nope'"]
