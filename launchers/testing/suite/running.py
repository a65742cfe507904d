"""Jobs that run to their end."""

from __future__ import annotations

import json

import pytest

from orc.launchers.backends.base import Backend, Cause, LogSelector, Phase
from orc.launchers.testing.jobs import MakeJob, RunJob

NASTY = [
    "two words",
    'double "quotes"',
    "single 'quotes'",
    "$HOME $(id) `id`",
    "a\nb",
    "ünïcode ✓",
    "*",
    "-x",
    "",
    "\\",
    "{python}",
]


def test_all_ranks_of_two_nodes_see_who_they_are(run: RunJob, launcher: str) -> None:
    job, seen = run(
        """
        import json, os
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        print(json.dumps({n: os.environ[n] for n in names}))
        print(json.dumps({n: v for n, v in os.environ.items() if n.startswith("ORC_")}))
        print(os.getcwd())
        """,
        nodes=2,
        procs=2,
        launcher=launcher,
    )
    assert (seen.phase, seen.cause) == (Phase.SUCCEEDED, None)
    assert seen.exit is not None
    assert {rank: record["exit_code"] for rank, record in seen.exit.ranks.items()} == {0: 0, 1: 0, 2: 0, 3: 0}
    assert seen.exit.complete
    assert len(seen.hosts) == 2
    assert seen.started_at is not None
    assert seen.ended_at is not None
    assert seen.started_at <= seen.ended_at
    lines = [job.log(rank).splitlines() for rank in range(4)]
    ranks = [json.loads(line[0]) for line in lines]
    assert [r["RANK"] for r in ranks] == ["0", "1", "2", "3"]
    assert [r["LOCAL_RANK"] for r in ranks] == ["0", "1", "0", "1"]
    assert [r["GROUP_RANK"] for r in ranks] == ["0", "0", "1", "1"]
    assert {r["WORLD_SIZE"] for r in ranks} == {"4"}
    assert {r["LOCAL_WORLD_SIZE"] for r in ranks} == {"2"}
    assert len({(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks}) == 1
    told = [json.loads(line[1]) for line in lines]
    assert {t["ORC_MARKER"] for t in told} == {job.plan.marker}
    assert [t["ORC_NODE_RANK"] for t in told] == ["0", "0", "1", "1"]
    assert {t["ORC_NNODES"] for t in told} == {"2"}
    assert {t["ORC_JOB_ID"] for t in told} == {job.plan.attempt.job}
    assert {t["ORC_ATTEMPT_DIR"] for t in told} == {str(job.directory)}
    assert {line[2] for line in lines} == {str(job.work)}


def test_processes_of_xla_are_told_which_part_of_the_tpu_is_theirs(run: RunJob) -> None:
    job, seen = run(
        """
        import json, os
        print(json.dumps({n: v for n, v in os.environ.items() if n.startswith(("TPU_", "PJRT_", "CLOUD_TPU"))}))
        print(os.environ["RANK"], os.environ["TORCHELASTIC_RUN_ID"] == os.environ["ORC_RDZV_ID"])
        """,
        nodes=2,
        procs=4,
        launcher={
            "kind": "xla",
            "options": {"metadata": "variables", "accelerator_type": "v4-16", "topology": "2x2x2"},
        },
        env={"TPU_PROCESS_PORT": "9"},
    )
    assert (seen.phase, seen.cause) == (Phase.SUCCEEDED, None), job.all_logs()
    lines = [job.log(rank).splitlines() for rank in range(8)]
    assert [line[1] for line in lines] == [f"{rank} True" for rank in range(8)]
    told = [json.loads(line[0]) for line in lines]
    names = told[0]["TPU_WORKER_HOSTNAMES"].split(",")
    assert len(set(names)) == 2
    for rank, variables in enumerate(told):
        assert variables == {
            "PJRT_DEVICE": "TPU",
            "PJRT_LOCAL_PROCESS_COUNT": "4",
            "PJRT_LOCAL_PROCESS_RANK": str(rank % 4),
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v4-16",
            "TPU_PROCESS_BOUNDS": "2,2,2",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_VISIBLE_CHIPS": str(rank % 4),
            "TPU_WORKER_ID": str(rank // 4),
            "TPU_WORKER_HOSTNAMES": ",".join(names),
            "TPU_PROCESS_ADDRESSES": ",".join(f"{name}:{port}" for name in names for port in range(8476, 8480)),
            "TPU_PROCESS_PORT": "9",  # the job's own
            "CLOUD_TPU_TASK_ID": str(rank),
        }


@pytest.mark.distributed
def test_four_ranks_on_two_nodes_reduce_a_tensor_together(run: RunJob, launcher: str) -> None:
    job, seen = run(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x)
        print("sum", x.item())
        dist.destroy_process_group()
        """,
        nodes=2,
        procs=2,
        launcher=launcher,
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert [job.log(rank).splitlines()[-1] for rank in range(4)] == ["sum 6.0"] * 4


def test_the_runtime_can_be_imported_and_what_was_on_the_path_stays(run: RunJob) -> None:
    job, seen = run(
        """
        import os, sys
        import orc.runtime
        tree = os.environ["PYTHONPATH"].split(os.pathsep)
        assert orc.runtime.__file__.startswith(tree[0]), orc.runtime.__file__
        print(tree[1:])
        """,
        env={"PYTHONPATH": "/somewhere/else:/and/here"},
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert job.log(0).strip() == "['/somewhere/else', '/and/here']"


def test_arguments_environment_and_secrets_arrive_verbatim(run: RunJob, launcher: str) -> None:
    values = {f"NASTY_{i}": value for i, value in enumerate(NASTY)}
    hidden = {f"SECRET_{i}": f"geheim-{value}" for i, value in enumerate(NASTY)}
    job, seen = run(
        """
        import json, os, sys
        print(json.dumps([sys.argv[1:], {n: v for n, v in os.environ.items() if n.startswith(("NASTY_", "SECRET_"))}]))
        """,
        args=NASTY,
        env=values,
        secrets=hidden,
        launcher=launcher,
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    arguments, environment = json.loads(job.log(0))
    assert arguments == NASTY
    assert environment == {**values, **hidden}


def test_a_secret_is_in_no_file_once_the_attempt_is_over(run: RunJob) -> None:
    value = "sehr-geheim-4711"
    job, seen = run(
        """
        import os
        raise SystemExit(f"a token of {len(os.environ['TOKEN'])} characters")
        """,
        secrets={"TOKEN": value},
    )
    assert seen.phase is Phase.FAILED
    assert job.log(0) == "a token of 16 characters\n"
    assert value not in json.dumps(job.plan.to_dict())
    job.until(lambda _: not any((directory / "secrets.json").exists() for directory in job.directories))
    for directory in job.directories:
        for path in directory.rglob("*"):
            if path.is_file():
                assert value.encode() not in path.read_bytes(), path


def test_a_job_that_ends_well_leaves_nothing_in_the_background(run: RunJob) -> None:
    job, seen = run(
        """
        import os, subprocess, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)  # a daemon
            os._exit(0)
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("done")
        """
    )
    assert seen.phase is Phase.SUCCEEDED
    assert job.log(0) == "done\n"


def test_setup_runs_once_per_node_before_the_ranks(run: RunJob) -> None:
    job, seen = run(
        "print(*open('made-by-setup').read().split())",
        nodes=2,
        procs=2,
        setup=["echo $ORC_NODE_RANK >> made-by-setup", "echo setup says hello"],
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert job.log(0) == job.log(1)
    assert job.log(2) == job.log(3)
    made = [(place / "made-by-setup").read_text() for place in job.view(job.plan, job.work)]
    assert sorted("".join(made).split()) == ["0", "1"]
    assert "setup says hello" in job.log(node=0)


def test_a_shell_command_runs_once_per_rank(run: RunJob) -> None:
    job, seen = run("", script=None, command='echo "rank $RANK of $WORLD_SIZE:"', args=["x", "it's"], procs=2)
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert [job.log(rank) for rank in (0, 1)] == ["rank 0 of 2: x it's\n", "rank 1 of 2: x it's\n"]


def test_logs_are_read_by_rank_from_a_byte_offset_and_followed(make_job: MakeJob) -> None:
    job = make_job(
        """
        import os, pathlib, time
        rank = os.environ["RANK"]
        print("rank", rank, "ä" * 10, flush=True)
        while not pathlib.Path(os.environ["ORC_JOB_DIR"], "go").exists():
            time.sleep(0.02)
        print("more of", rank)
        """,
        procs=2,
    ).submit()
    job.until_log(0, "\n")
    job.until_log(1, "\n")
    first = job.log(1)
    assert first == "rank 1 ääääääääää\n"
    offset = len(first.encode())
    assert job.log(1, offset=offset) == ""
    job.go()
    job.wait()
    assert job.log(1, offset=offset) == "more of 1\n"
    assert job.log(1, offset=5) == "1 ääääääääää\nmore of 1\n"
    selectors = job.backend.log_selectors(job.handle)
    assert selectors[:3] == [LogSelector(rank=0), LogSelector(rank=1), LogSelector(node=0)]
    chunks = list(job.backend.logs(job.handle, LogSelector(rank=0), 3))
    assert chunks[0].offset == 3
    assert chunks[-1].end == len(job.log(0).encode())


def test_a_long_log_comes_in_chunks_that_join(run: RunJob) -> None:
    job, _ = run("for i in range(400_000): print(i)")
    chunks = list(job.backend.logs(job.handle, LogSelector(rank=0)))
    assert len(chunks) > 1
    assert [c.offset for c in chunks[1:]] == [c.end for c in chunks[:-1]]
    assert b"".join(c.data for c in chunks).decode().split() == [str(i) for i in range(400_000)]


def test_many_attempts_are_polled_in_one_look(make_job: MakeJob, backend_under_test: Backend) -> None:
    good, bad = make_job("pass").submit(), make_job("raise SystemExit(3)").submit()
    good.wait()
    bad.wait()
    seen = backend_under_test.poll([good.handle, bad.handle])
    assert {h: (o.phase, o.cause) for h, o in seen.items()} == {
        good.handle: (Phase.SUCCEEDED, None),
        bad.handle: (Phase.FAILED, Cause.CRASH),
    }
    assert backend_under_test.poll([]) == {}


def test_progress_that_a_rank_reports_is_seen(make_job: MakeJob) -> None:
    job = make_job(
        """
        import json, os, pathlib, time
        target = pathlib.Path(os.environ["ORC_ATTEMPT_DIR"], "node-" + os.environ["ORC_NODE_RANK"], "progress.json")
        target.with_suffix(".tmp").write_text(json.dumps({"step": 120, "loss": 0.5}))
        target.with_suffix(".tmp").rename(target)
        while not pathlib.Path(os.environ["ORC_JOB_DIR"], "go").exists():
            time.sleep(0.02)
        """
    ).submit()
    seen = job.until(lambda o: bool(o.progress) or o.phase.ended)
    assert seen.phase is Phase.RUNNING
    assert dict(seen.progress) == {"step": 120, "loss": 0.5}
    job.go()
    job.wait()


def test_a_file_of_the_job_is_read_as_the_first_node_has_it_from_any_byte_on(run: RunJob) -> None:
    job, _ = run(
        """
        import os, pathlib
        if os.environ["RANK"] == "0":
            pathlib.Path(os.environ["ORC_JOB_DIR"], "metrics.jsonl").write_bytes(b"one\\ntwo\\n")
        """,
        nodes=2,
    )
    found = [job.backend.read_file(job.handle, "metrics.jsonl", offset) for offset in (0, 4, 8, 100)]
    assert found == [b"one\ntwo\n", b"two\n", b"", b""]
    assert job.backend.read_file(job.handle, "nothing.jsonl") == b""
