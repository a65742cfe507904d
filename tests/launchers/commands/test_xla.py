"""What is rendered for PyTorch/XLA."""

from __future__ import annotations

import subprocess
import sys

import pytest

POD = {"nodes": 2, "procs_per_node": 4}
OFF = {"metadata": "variables", "accelerator_type": "v4-16", "topology": "2x2x2"}


def test_each_process_calls_the_named_function_of_the_script(build, tmp_path) -> None:
    script = tmp_path / "with two.py"
    script.write_text(
        "import json, sys\nfrom beside import where\n"
        "def train():\n    print(json.dumps([where, sys.argv[1:]]))\n"
        "if __name__ == '__main__':\n    print('the whole script')\n"
    )
    (tmp_path / "beside.py").write_text("where = 'beside'")
    command = build("xla", {"function": "train"}, script=script.name, args=["a b", "train"], resources=POD)
    words = [sys.executable if word == "{python}" else word for word in command.program]
    run = {"capture_output": True, "text": True, "cwd": tmp_path}
    assert subprocess.run(words, **run).stdout == '["beside", ["a b", "train"]]\n'
    words[words.index("train")] = "nowhere"
    assert "has no function nowhere" in subprocess.run(words, **run).stderr


def test_processes_meet_as_those_of_torchrun_do_which_is_what_torch_xla_looks_for(build) -> None:
    assert build("xla", resources=POD).env["TORCHELASTIC_RUN_ID"] == "{rdzv_id}"
    assert "TORCHELASTIC_RUN_ID" not in build("xla").env  # alone there is nobody to meet
    assert "TORCHELASTIC_RUN_ID" not in build("xla", {"processes": "host"}, resources={"nodes": 2}).env


def test_a_single_process_takes_one_chip_of_a_machine(build) -> None:
    command = build("xla")
    assert command.env["TPU_PROCESS_BOUNDS"] == command.env["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert command.rank_env["TPU_VISIBLE_CHIPS"] == ("0",)


def test_one_process_per_host_sees_all_chips(build) -> None:
    command = build("xla", {"processes": "host"}, resources={"nodes": 4})
    assert (dict(command.env), command.rank_env) == ({"PJRT_DEVICE": "TPU"}, {})


@pytest.mark.parametrize(
    ("accelerator", "topology", "nodes", "hosts", "chips"),
    [
        ("v3-32", "4x4", 4, "2,2,1", "2,2,1"),
        ("v4-8", "2x2x1", 1, "1,1,1", "2,2,1"),
        ("v4-16", "2x2x2", 2, "1,1,2", "2,2,1"),
        ("v4-256", "4x4x8", 32, "2,2,8", "2,2,1"),
        ("v5litepod-8", "2x4", 1, "1,1,1", "2,4,1"),
        ("v5litepod-16", "4x4", 4, "2,2,1", "2,2,1"),
        ("v6e-1", "1x1", 1, "1,1,1", "1,1,1"),
    ],
)
def test_off_the_metadata_server_the_machines_follow_from_the_topology(
    build, accelerator: str, topology: str, nodes: int, hosts: str, chips: str
) -> None:
    options = {"metadata": "variables", "accelerator_type": accelerator, "topology": topology, "processes": "host"}
    env = build("xla", options, resources={"nodes": nodes}).env
    assert env["TPU_SKIP_MDS_QUERY"] == "1"
    assert env["TPU_ACCELERATOR_TYPE"] == accelerator
    assert (env["TPU_PROCESS_BOUNDS"], env["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == (hosts, chips)
    assert env["TPU_WORKER_ID"] == "{node_rank}"


def test_processes_of_one_chip_each_lie_like_the_chips(build) -> None:
    command = build("xla", {**OFF, "base_port": 9000}, resources=POD)
    assert command.env["TPU_PROCESS_BOUNDS"] == "2,2,2"
    assert command.env["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert command.host_env == {
        "TPU_WORKER_HOSTNAMES": "{host}",
        "TPU_PROCESS_ADDRESSES": "{host}:9000,{host}:9001,{host}:9002,{host}:9003",
    }
    assert command.rank_env == {
        "PJRT_LOCAL_PROCESS_RANK": ("0", "1", "2", "3"),
        "TPU_PROCESS_PORT": ("9000", "9001", "9002", "9003"),
        "CLOUD_TPU_TASK_ID": ("{rank}",) * 4,
        "TPU_VISIBLE_CHIPS": ("0", "1", "2", "3"),
    }


def test_one_machine_needs_no_topology(build) -> None:
    env = build("xla", {"metadata": "variables", "accelerator_type": "v6e-8"}, resources={"procs_per_node": 8}).env
    assert env["TPU_PROCESS_BOUNDS"] == "2,4,1"


@pytest.mark.parametrize(
    ("options", "resources", "reason"),
    [
        ({"proceses": "chip"}, {}, "unknown option 'proceses', did you mean 'processes'?"),
        ({"processes": "core"}, {}, "option processes = 'core': expected one of chip, host"),
        ({"processes": "host"}, POD, "option processes = 'host' is one process per node, and resources say 4"),
        ({"device": "tpu"}, {}, "option device = 'tpu': expected one of TPU, CPU"),
        ({"device": "CPU"}, POD, "option device = 'CPU' is for one process, and resources say 8: on the CPU torch_xla"),
        ({"num_processes": 8}, {}, "option num_processes cannot be given: it follows from resources.nodes"),
        ({"topology": "2x2"}, {}, "option topology is for metadata: variables; the metadata server knows it"),
        ({"metadata": "variables"}, {}, "option metadata = 'variables' needs accelerator_type, for example v4-16"),
        ({**OFF, "device": "CPU"}, {}, "option metadata = 'variables' describes a TPU, and the device is CPU"),
        ({**OFF, "topology": "2x2x2x2"}, POD, "option topology = '2x2x2x2': expected chips like 2x2x4"),
        ({**OFF, "topology": "3x2x1"}, POD, "option topology = '3x2x1': 6 chips are not 1, 4 or 8 for each of 2 nodes"),
        ({**OFF, "topology": "1x8x1"}, POD, "option topology = '1x8x1': it cannot be cut into machines of 2,2,1 chips"),
        (OFF, {"nodes": 2, "procs_per_node": 2}, "option topology = '2x2x2': each of 2 nodes has 4 chips, and"),
        (OFF, {"nodes": "1:2", "procs_per_node": 4}, "option metadata = 'variables': a slice has a fixed number of"),
        ({**OFF, "accelerator_type": "v3-16"}, POD, "option accelerator_type = 'v3-16': a chip of v2 and v3 is two"),
        ({}, {"nodes": 2}, "one process for each chip of several nodes needs resources.procs_per_node"),
        (
            {"metadata": "variables", "accelerator_type": "v4-16"},
            POD,
            "option metadata = 'variables' needs topology: the chips of the slice, for example 2x2x4",
        ),
        (
            {"metadata": "variables", "accelerator_type": "v4-8"},
            {"procs_per_node": 3},
            "option metadata = 'variables': a machine has 1, 4 or 8 chips, and resources say 3 processes",
        ),
    ],
)
def test_what_cannot_work_is_refused(refusal, options: dict[str, object], resources, reason: str) -> None:
    assert refusal("xla", options, resources=resources).startswith(reason)
