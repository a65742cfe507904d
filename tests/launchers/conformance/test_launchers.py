"""Every launcher with its ways and dialects, really started: two nodes with two ranks each on this machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.backends.base import Backend, Cause, Phase

MPICH = {"kind": "mpirun", "options": {"program": "mpirun.mpich"}}
DEEPSPEED = {"kind": "deepspeed", "options": {"log_level": "warning"}}
ELASTIC = {"rdzv_backend": "c10d", "monitor_interval": 0.1}
C10D = {"kind": "torchrun", "options": {**ELASTIC, "rdzv_conf": {"join_timeout": 300}}}


def deepspeed(launcher: str, **options: Any) -> dict[str, Any]:
    return {"kind": "deepspeed", "options": {"launcher": launcher, **options}}


LAUNCHERS: dict[str, tuple[dict[str, Any], str]] = {  # and the program that the machine needs
    "mpirun of Open MPI": ({"kind": "mpirun"}, "mpirun.openmpi"),
    "mpirun of MPICH": (MPICH, "mpirun.mpich"),
    "deepspeed": (DEEPSPEED, "sh"),
    "deepspeed over pdsh": (deepspeed("pdsh"), "pdsh"),
    "deepspeed over Open MPI": (deepspeed("openmpi"), "mpirun.openmpi"),
    "deepspeed over MPICH": (deepspeed("mpich"), "mpirun.mpich"),
    "torchrun c10d": (C10D, "sh"),
}
WITHOUT_MLFLOW = Path(__file__).parents[2] / "testbed" / "without"
NASTY = ["a b", "$HOME", "it's", 'x"y', "%n", "`id`", "back\\slash", "{python}", "--local_rank", ""]


@pytest.fixture
def backend_under_test(local_backend: Backend) -> Backend:
    return local_backend


@pytest.fixture
def need(tmp_path: Path):
    """A launcher that this machine can start, and the settings of a job that it needs."""

    def need(name: str) -> dict[str, Any]:
        launcher, program = LAUNCHERS[name]
        found = shutil.which(program)
        if found is None:
            pytest.skip(f"no {program} (Debian: openmpi-bin, mpich, pdsh)")
        env = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(WITHOUT_MLFLOW)}
        if name == "deepspeed over MPICH":
            # DeepSpeed calls "mpirun" and means that of MPICH; the one of this machine may be another.
            (tmp_path / "mpich").mkdir()
            (tmp_path / "mpich" / "mpirun").write_text(f'#!/bin/sh\nexec {found} "$@"\n')
            (tmp_path / "mpich" / "mpirun").chmod(0o755)
            env["PATH"] = f"{tmp_path / 'mpich'}{os.pathsep}{os.environ['PATH']}"
        return {"launcher": launcher, "env": env}

    return need


# Over pdsh on real hosts: tests/e2e/test_hosts_commands.py.
@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name != "deepspeed over pdsh"])
def test_ranks_know_who_they_are_and_get_their_arguments_untouched(name, need, run) -> None:
    procs = 1 if name == "deepspeed over MPICH" else 2  # each rank begins with a process that imports DeepSpeed
    job, seen = run(
        """
        import json, os, sys
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ORC_NODE_RANK", "MASTER_PORT"]
        print(json.dumps([[os.environ[name] for name in names], sys.argv[1:], os.getcwd()]))
        """,
        nodes=2,
        procs=procs,
        args=NASTY,
        **need(name),
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert seen.exit is not None
    assert {rank: record["exit_code"] for rank, record in seen.exit.ranks.items()} == dict.fromkeys(range(2 * procs), 0)
    ports = set()
    for rank in range(2 * procs):
        who, arguments, cwd = json.loads(job.log(rank))
        assert who[:4] == [str(rank), str(rank % procs), str(2 * procs), str(procs)]
        if name != "torchrun c10d":  # which numbers its nodes in the order of their arrival
            assert who[5] == str(rank // procs)
        ports.add((who[4], who[6]))
        assert arguments == NASTY
        assert cwd == str(job.directory.parent / "work")
    assert len(ports) == 1


@pytest.mark.parametrize(("name", "nodes"), [("mpirun of MPICH", 2), ("deepspeed", 1)])
def test_the_rank_that_failed_first_is_named_with_its_signal(name, nodes, need, run) -> None:
    job, seen = run(
        """
        import os, time
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            print("about to die", flush=True)
            os.kill(os.getpid(), 9)
        for _ in range(600):
            time.sleep(0.1)
        """,
        nodes=nodes,
        procs=2,
        **need(name),
    )
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH), job.all_logs()
    assert seen.exit is not None
    first = seen.exit.first_failure
    assert first is not None
    assert (first.rank, first.node, first.exit_code, first.signal) == (2 * nodes - 1, nodes - 1, None, "SIGKILL")
    assert first.log_tail == "about to die"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_launcher_that_ends_well_does_not_hide_a_rank_that_did_not(nodes, need, run) -> None:
    last = 2 * nodes - 1
    source = f"import os, sys; sys.exit(7 if os.environ['RANK'] == '{last}' else 0)"
    job, seen = run(source, nodes=nodes, procs=2, **need("mpirun of Open MPI"))
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH), job.all_logs()
    assert seen.exit is not None
    assert seen.exit.exit_status == 7
    assert seen.exit.first_failure is not None
    assert seen.exit.first_failure.rank == last


@pytest.mark.parametrize(  # quick: the node whose ranks have saved long before the others
    ("name", "quick"),
    [("mpirun of Open MPI", 0), ("mpirun of MPICH", 1), ("deepspeed over pdsh", 1)],
)
def test_a_cancellation_reaches_the_ranks_of_all_nodes_and_gives_them_their_grace(name, quick, need, make_job) -> None:
    job = make_job(
        """
        import os, signal, sys, time
        def save(*_):
            time.sleep(0.3 if os.environ["ORC_NODE_RANK"] == sys.argv[1] else 2.0)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
        """,
        nodes=2,
        procs=2,
        args=[str(quick)],
        **need(name),
    ).submit()
    for rank in range(4):
        job.until_log(rank, "ready")
    job.cancel(30)
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED), job.all_logs()
    assert [job.log(rank) for rank in range(4)] == ["ready\nsaved\n"] * 4


@pytest.mark.parametrize("name", ["mpirun of Open MPI", "mpirun of MPICH"])
def test_a_rank_that_asks_to_be_run_again_does_not_cost_the_others_their_checkpoint(name, need, run) -> None:
    job, seen = run(
        """
        import os, sys, time
        if os.environ["RANK"] != "1":
            time.sleep(2.5)  # it takes longer to save
            print("saved", flush=True)
        sys.exit(75)
        """,
        nodes=2,
        procs=2,
        grace=60,  # theirs begins with the first that asks: some may only just start
        **need(name),
    )
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.PREEMPTED), job.all_logs()
    assert [job.log(rank) for rank in (0, 2, 3)] == ["saved\n"] * 3


def test_torchrun_restarts_the_ranks_where_it_may(need, run) -> None:
    job, seen = run(
        """
        import os, sys
        print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)
        """,
        procs=2,
        launcher={"kind": "torchrun", "options": {**ELASTIC, "max_restarts": 1}},
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert job.log(1) == "round 0\nround 1\n"
    rounds = [json.loads(job.read(f"a1/node-0/rank-{rank}-r0.json"))["round"] for rank in range(2)]
    assert rounds == [1, 1]


def test_the_last_failure_counts_when_the_restarts_are_used_up(run) -> None:
    job, seen = run(
        """
        import os, sys
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.exit(10 + count if os.environ["RANK"] == str(count) else 0)
        """,
        procs=2,
        launcher={"kind": "torchrun", "options": {**ELASTIC, "max_restarts": 1}},
    )
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH), job.all_logs()
    assert seen.exit is not None
    assert seen.exit.first_failure is not None
    assert (seen.exit.first_failure.rank, seen.exit.first_failure.exit_code) == (1, 11)


@pytest.mark.parametrize("name", ["mpirun of Open MPI", "mpirun of MPICH"])
def test_oneccl_and_the_jobs_own_variables_reach_every_node(name, need, run) -> None:
    needs = need(name)
    options = {**needs["launcher"].get("options", {}), "ccl_worker_count": 2}
    job, seen = run(
        "import os; print(*(os.environ[n] for n in ('CCL_WORKER_COUNT', 'CCL_ATL_TRANSPORT', 'MINE')))",
        nodes=2,
        procs=1,
        **{**needs, "launcher": {"kind": "mpirun", "options": options}, "env": {"MINE": "a 'b"}},
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert [job.log(rank) for rank in range(2)] == ["2 ofi a 'b\n"] * 2


def test_deepspeed_reads_its_environment_file_passes_local_rank_when_asked_and_uses_the_devices_of_the_node(
    run, tmp_path
) -> None:
    (tmp_path / "workdir").mkdir()
    (tmp_path / "workdir" / ".deepspeed_env").write_text("FROM_FILE=a b\n# a comment\nLAST=1")
    job, seen = run(
        "import os, sys; print(*map(os.environ.get, ('FROM_FILE', 'LAST', 'CUDA_VISIBLE_DEVICES')), *sys.argv[1:])",
        procs=2,
        args=["x y"],
        env={"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "3,5", "PYTHONPATH": str(WITHOUT_MLFLOW)},
        launcher={"kind": "deepspeed", "options": {"local_rank": True}},
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert [job.log(rank) for rank in range(2)] == [f"a b 1 3,5 --local_rank={rank} x y\n" for rank in range(2)]


def test_a_node_that_cannot_start_its_part_is_named_when_the_launcher_waits_for_it(need, run, tmp_path) -> None:
    need("mpirun of MPICH")
    (tmp_path / "mpirun").symlink_to(shutil.which("mpirun.mpich") or "")  # it looks for its daemon beside itself
    options = {"dialect": "mpich", "program": str(tmp_path / "mpirun")}
    job, seen = run("print('never')", nodes=2, launcher={"kind": "mpirun", "options": options})
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH), job.all_logs()
    assert seen.exit is not None
    first = seen.exit.first_failure
    assert first is not None
    assert (first.rank, first.exit_code) == (None, 127)
    assert f"{tmp_path}/hydra_pmi_proxy" in first.log_tail


def test_what_is_no_mpirun_is_said_to_be_none(run) -> None:
    launcher = {"kind": "mpirun", "options": {"program": "/bin/echo"}}
    job, seen = run("print('never')", procs=2, launcher=launcher)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert "/bin/echo: not Open MPI or MPICH or Intel MPI" in job.log(node=0)
