"""Processes of a launch: from flags, from the GPUs of the machine, and from what has started it."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.accelerate.merge import merge
from orc.launchers.errors import LaunchError
from orc.launchers.foreground import torchrun
from orc.launchers.foreground.documented import Documented, documented, kernel_note, streams, visible_gpus
from orc.launchers.foreground.launch import LocalLaunch
from orc.launchers.foreground.mpirun import check_hosts, command_line

OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")} | {
    f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")
}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_ID": "7",
}


def described(
    flags: dict[str, Any], env: dict[str, str] | None = None, gpus: int = 0, nproc: int | None = None
) -> Documented:
    env = env or {}
    return documented(LocalLaunch(["s.py"]), merge(flags, {}, env), env, nproc=nproc, count=lambda _env: gpus)


def test_all_gpus_are_used_and_it_is_said() -> None:
    found = described({}, gpus=4)
    assert found.request.nprocs == 4
    assert found.notes == ["4 GPUs, one process on each; --num_processes takes another number"]
    for flags, nprocs in (({"num_processes": 2}, 2), ({"cpu": True}, 1), ({"multi_gpu": True, "num_processes": 3}, 3)):
        quiet = described(flags, gpus=4)
        assert (quiet.request.nprocs, quiet.notes) == (nprocs, [])
    assert described({}).request.nprocs == 1
    chosen = described({"gpu_ids": ["0", "2"]})
    assert chosen.request.env["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_a_layout_that_the_processes_do_not_make_is_refused_before_any_starts() -> None:
    flags = {"use_parallelism_config": True, "parallelism_config_tp_size": 4, "num_processes": 2, "cpu": True}
    with pytest.raises(LaunchError, match="tp_size 4 makes 4 processes, and there are 2"):
        described(flags)
    assert described({**flags, "num_processes": 4}).request.nprocs == 4
    with pytest.raises(LaunchError, match="cp_size and sp_size are two ways"):
        described({**flags, "parallelism_config_cp_size": 2, "parallelism_config_sp_size": 2})


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2
    counts = {"": 0, "0,1,3": 3, "1,-1,2": 1, "GPU-8932f937-d72c,MIG-1/2": 2, "none": 0}
    for text, count in counts.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}, tmp_path) == count
    (tmp_path / "empty").mkdir()
    assert visible_gpus({"PATH": str(tmp_path)}, tmp_path / "empty") == 0
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-1)'; echo '  MIG 1g'; echo 'GPU 1: A (UUID: GPU-2)'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert visible_gpus({"PATH": f"{tmp_path}:/bin"}, tmp_path / "empty") == 2


def test_gpus_of_amd_are_counted_too(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for number, gpu in enumerate(["0", *["4098"] * 8]):  # the first is the processor
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu}\n")
    assert visible_gpus({}, tmp_path / "dev") == 8
    assert visible_gpus({"HIP_VISIBLE_DEVICES": "0,3"}, tmp_path / "dev") == 2


def test_processes_are_numbered_over_machines() -> None:
    flags = {"num_processes": 6, "num_machines": 3, "machine_rank": 1, "main_process_ip": "10.0.0.1"}
    world = described({**flags, "main_process_port": 29400}).request.world
    assert world is not None
    assert [world.variables(index)["RANK"] for index in range(2)] == ["2", "3"]
    one = world.variables(1)
    assert (one["LOCAL_RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["GROUP_RANK"]) == ("1", "6", "2", "1")
    assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("10.0.0.1", "29400")
    # srun starts one launch on each machine: its variables say which, and where the first one is
    joined = described({"num_machines": 2, "num_processes": 8}, SRUN).request
    assert (joined.nprocs, joined.world and joined.world.first_rank, joined.world and joined.world.addr) == (4, 4, "n1")


@pytest.mark.parametrize("env", [OPEN_MPI, SRUN])
def test_below_mpirun_and_srun_a_launch_is_one_process_of_the_run(env: dict[str, str]) -> None:
    for flags in ({}, {"num_processes": 2}):
        request = described(flags, env, gpus=8).request
        assert request.nprocs == 1
        assert request.world is not None
        assert (request.world.size, request.world.first_rank) == (2, 1)
    # a rank of a job that starts something of its own, and a step of one process
    assert described({"num_processes": 3}, {**env, "ORC_MARKER": "m"}).request.world is None


@pytest.mark.parametrize(
    ("flags", "env", "gpus", "message"),
    [
        ({"multi_gpu": True}, {}, 0, "--multi_gpu: this machine has no GPU"),
        ({"multi_gpu": True, "num_processes": 4}, {}, 2, "4 processes, and this machine has 2 GPUs"),
        ({"num_machines": 2, "num_processes": 3, "main_process_ip": "h"}, {}, 0, "not a multiple of --num_machines 2"),
        ({"num_machines": 2, "machine_rank": 2, "main_process_ip": "h"}, {}, 0, "machines count from 0"),
        ({"num_machines": 2}, {}, 0, "needs --main_process_ip, the address of machine 0"),
        ({"num_processes": 3}, OPEN_MPI, 0, "has started 2 of these launches, and 3 processes were asked for"),
        ({"tee": "4"}, {}, 0, "--tee '4': expected 0, 1, 2 or 3"),
        ({"env": ["NAME"]}, {}, 0, "--env takes NAME=VALUE, not 'NAME'"),
        (
            {"mixed_precision": "fp8", "fp8_backend": "TE"},
            {},
            0,
            "needs the package transformer_engine[pytorch], which is",
        ),
        ({"mixed_precision": "fp8"}, {"ACCELERATE_FP8_BACKEND": "msamp"}, 0, "needs the package ms-amp, which is not"),
    ],
)
def test_processes_that_cannot_be_are_refused(
    flags: dict[str, Any], env: dict[str, str], gpus: int, message: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        described(flags, env, gpus)


def test_streams_are_chosen_for_all_ranks_or_by_rank(tmp_path: Path) -> None:
    assert streams("--tee", "3") == 3
    assert streams("--tee", "0:1,2:3") == {0: 1, 2: 3}
    request = described({"redirects": "2", "log_dir": str(tmp_path)}).request
    assert (request.tee, request.redirects, request.log_dir) == (0, 2, tmp_path)
    assert described({"log_dir": str(tmp_path)}).request.tee == 3


def test_mpirun_is_given_what_its_kind_understands(tmp_path: Path) -> None:
    hosts = tmp_path / "hostfile"
    hosts.write_text("# ours\nnode0 slots=4\nnode1 slots=4\n")
    values = merge({"mpirun_hostfile": str(hosts), "num_processes": 8, "num_machines": 2, "mpirun_ccl": 4}, {}, {})
    request = LocalLaunch(["s.py", "-n"], python="py", env={"ORC_SEED": "1"}, module=True)
    words, env = command_line(request, values, {"PATH": "/bin"}, "mpirun (Open MPI) 4.1.4")
    assert words[:7] == ["mpirun", "--hostfile", str(hosts), "-n", "8", "--map-by", "ppr:4:node"]
    assert words[-7:] == ["py", "-m", "orc.launch", "--module", "--", "s.py", "-n"]
    assert [words[i + 1] for i, word in enumerate(words) if word == "-x"] == [
        "ORC_SEED", "MASTER_ADDR", "MASTER_PORT", "CCL_WORKER_COUNT", "CCL_ATL_TRANSPORT",
    ]  # fmt: skip
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["CCL_ATL_TRANSPORT"]) == ("node0", "29500", "ofi")
    intel, _ = command_line(request, values, {}, "Intel(R) MPI Library for Linux* OS")
    assert intel[:7] == ["mpirun", "-f", str(hosts), "-n", "8", "-ppn", "4"]


def test_a_kernel_that_lets_ranks_hang_is_named() -> None:
    assert [bool(kernel_note(release)) for release in ("5.4.0-42-generic", "4.18.0", "5.5.1", "6.1.0", "odd")] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_torchrun_is_given_what_it_alone_understands(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()

    def words(flags: dict[str, Any], **changes: Any) -> tuple[bool, str]:
        values = merge(flags, {}, {})
        request = documented(LocalLaunch([str(script), "-n"], python="py", **changes), values, {}).request
        return torchrun.wanted(request, values), " ".join(torchrun.command_line(request, values))

    assert words({"rdzv_backend": "static"})[0] is False
    wanted, line = words({"rdzv_conf": {"join_timeout": "30"}, "rdzv_backend": "c10d", "num_processes": 2})
    assert (wanted, "--nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0" in line) == (1, 1)
    assert line.startswith("py -m torch.distributed.run")
    assert line.endswith(f"--local-addr=127.0.0.1 --rdzv-conf=join_timeout=30 {script} -n")
    machines = {"num_machines": 2, "num_processes": 4, "main_process_ip": "127.0.0.2", "main_process_port": 29400}
    static = {**machines, "monitor_interval": 2.0, "machine_rank": 1, "role": "trainer"}
    _, line = words(static, python_flags=("-O",))
    assert "--nnodes=2 --nproc-per-node=2 --rdzv-backend=static" in line
    assert "--master-addr=127.0.0.2 --master-port=29400 --node-rank=1 --monitor-interval=2.0 --role=trainer" in line
    assert line.endswith(f"--no-python py -O {script} -n")
    # One machine meets anew by c10d; on several the static rendezvous would hand out addresses of the dead.
    assert "--rdzv-backend=c10d" in words({"monitor_interval": 1.0, "max_restarts": 1})[1]
    with pytest.raises(LaunchError, match="again with --rdzv_backend c10d alone"):
        words({**static, "max_restarts": 1})
    values = merge({"rdzv_backend": "c10d"}, {}, {})
    assert not torchrun.wanted(documented(LocalLaunch(["s.py"]), values, OPEN_MPI).request, values)


def test_mpirun_reaches_every_machine_before_anything_is_started(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"

    def check(script: str, limit_s: float = 60.0) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        check_hosts([str(program), "-ppn", "1", "hostname"], 2, {"PATH": "/bin:/usr/bin"}, limit_s)

    check('[ "$*" = "-ppn 1 hostname" ] && echo node0 && echo node1')
    with pytest.raises(LaunchError, match="2 machines, and answers came from node0") as caught:
        check("echo node0; echo node0")
    assert caught.value.hint.endswith(f"try: {program} -ppn 1 hostname")
    with pytest.raises(LaunchError, match="every machine: node1: Permission denied"):
        check("echo more >&2; echo 'node1: Permission denied' >&2; exit 1")
    with pytest.raises(LaunchError, match=r"has not reached 2 machines in 0\.5 s; answers came from node0"):
        check("echo node0; exec sleep 60", 0.5)
