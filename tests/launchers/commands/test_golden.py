"""What the launchers are started with, byte for byte. ``ORC_UPDATE_GOLDEN=1`` writes it anew; read the diff first."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from golden_plans import GOLDEN, compare

from orc.launchers.commands.base import NodeCommand

C10D = {
    "rdzv_backend": "c10d",
    "role": "trainer",
    "max_restarts": 3,
    "monitor_interval": 1,
    "virtual_local_rank": True,
    "rdzv_conf": {"join_timeout": 30, "x": "y"},
}
LAUNCHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "torchrun": ("torchrun", {}),
    "torchrun-c10d": ("torchrun", C10D),
    "mpirun": ("mpirun", {}),
    "mpirun-openmpi": (
        "mpirun",
        {
            "dialect": "openmpi",
            "program": "/opt/open mpi/bin/mpirun",
            "bind_to": "core",
            "map_by": "ppr:2:socket",
            "mca": {"oob_tcp_if_include": "10.0.0.0/8", "oob_tcp_keepalive_time": 60},
            "arguments": ["--report-bindings", "--tag-output"],
        },
    ),
    "mpirun-mpich": (
        "mpirun",
        {"dialect": "mpich", "program": "mpiexec.hydra", "bind_to": "numa", "map_by": "hwthread", "arguments": ["-v"]},
    ),
    "mpirun-intel": (
        "mpirun",
        {"dialect": "intel", "bind_to": "socket", "ccl_worker_count": 2, "ccl_atl_transport": "ofi"},
    ),
    "deepspeed": ("deepspeed", {}),
    "deepspeed-slurm": ("deepspeed", {"launcher": "slurm", "log_level": "warning"}),
    "deepspeed-local-rank": ("deepspeed", {"local_rank": True, "bind_cores_to_rank": True, "bind_core_list": "0-3,7"}),
    "deepspeed-pdsh": ("deepspeed", {"launcher": "pdsh", "include": "node1@node2:0,2", "launcher_args": ["-u", "5 0"]}),
    "deepspeed-exclude": ("deepspeed", {"launcher": "pdsh", "exclude": "node3"}),
    "deepspeed-openmpi": ("deepspeed", {"launcher": "openmpi", "launcher_args": ["--mca", "a", "b c"]}),
    "deepspeed-mpich": ("deepspeed", {"launcher": "mpich"}),
    "deepspeed-impi": ("deepspeed", {"launcher": "impi"}),
    "ray": ("ray", {}),
    "ray-options": (
        "ray",
        {
            "num_cpus": 8,
            "num_gpus": 2,
            "resources": {"licence": 1},
            "object_store_memory": "2GiB",
            "object_manager_port": 8076,
            "min_worker_port": 10002,
            "max_worker_port": 10999,
        },
    ),
    "xla": ("xla", {}),
    "xla-variables": ("xla", {"metadata": "variables", "accelerator_type": "v4-16", "topology": "2x2x2"}),
}
SHELL = ("mpirun", "deepspeed")


def told(command: NodeCommand) -> str:
    """All of it, to be read by people."""
    lines = [f"primary: {command.primary}", f"settle_s: {command.settle_s:g}", f"only_on: {', '.join(command.only_on)}"]
    lines += ["remote shell"] if command.remote_shell else []
    lines += [f"env {name}={value}" for name, value in command.env.items()]
    lines += [f"hostfile {name}: {line!r}" for name, line in command.hostfiles.items()]
    lines += [f"host env {name}={text}" for name, text in command.host_env.items()]
    lines += [f"rank env {name}={' | '.join(texts)}" for name, texts in command.rank_env.items()]
    lines += [f"{each.role} on the {each.nodes}: {word}" for each in command.services for word in each.argv]
    lines += [f"ready: {word}" for word in command.ready]
    lines += [f"launcher: {word}" for word in command.launcher]
    lines += [f"program: {word}" for word in command.program]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_is_started_is_known_to_the_byte(name: str, build) -> None:
    kind, options = LAUNCHERS[name]
    resources = {"nodes": 2, "procs_per_node": 1 if kind == "ray" else 4}
    text = told(build(kind, options, args=["--note", "it's $5"], resources=resources))
    compare(f"commands/{name}.txt", text)


def test_every_golden_file_belongs_to_a_test() -> None:
    assert sorted(path.stem for path in (GOLDEN / "commands").iterdir()) == sorted(LAUNCHERS)


@pytest.mark.parametrize("name", [name for name, (kind, _) in LAUNCHERS.items() if kind in SHELL])
def test_scripts_are_shell(name: str, build) -> None:
    kind, options = LAUNCHERS[name]
    shell, flag, text, *_ = build(kind, options).launcher
    assert (shell, flag) == ("/bin/sh", "-c")
    done = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["ray", "ray-options"])
def test_services_are_started_by_shell(name: str, build) -> None:
    kind, options = LAUNCHERS[name]
    for service in build(kind, options).services:
        done = subprocess.run(["/bin/sh", "-n"], input=service.argv[2], text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
