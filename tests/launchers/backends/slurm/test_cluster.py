"""The Slurm backend against a real Slurm: what it is asked, what it refuses, what it forgets."""

from __future__ import annotations

import json
import shutil
import time
from datetime import timedelta

import pytest
from slurm_testbed import eventually

from orc.launchers.backends.base import Cause, Handle, LogSelector, Phase
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable

OK = "print('ok')"
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def test_ranks_of_two_nodes_find_each_other_and_their_gpus(runs) -> None:
    script = """
import os, socket
print(os.environ["RANK"], os.environ["WORLD_SIZE"], socket.gethostname(), os.environ["CUDA_VISIBLE_DEVICES"])
"""
    run = runs.start(
        script,
        resources={"nodes": 2, "gpus_per_node": 2, "options": {"slurm": {"partition": "gpu", "gpu_type": "a100"}}},
    )
    seen = run.ended()
    assert seen.phase is Phase.SUCCEEDED, run.everything()
    assert [run.log(rank).split() for rank in range(4)] == [
        [str(rank), "4", f"node{3 + rank // 2}", "0,1"] for rank in range(4)
    ]
    assert seen.hosts == ("node3", "node4")
    assert seen.exit is not None
    assert sorted(seen.exit.ranks) == [0, 1, 2, 3]
    assert seen.started_at is not None
    assert seen.ended_at is not None
    assert run.handle.submitted_at - 1 <= seen.started_at <= seen.ended_at <= time.time()


def test_a_range_of_nodes_takes_as_many_as_there_are(runs) -> None:
    script = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['ORC_NNODES'])"
    runs.slurm.run("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 60")
    eventually(lambda: "alloc" in runs.slurm.run("sinfo", "--noheader", "--format=%T"))
    run = runs.start(script, resources={"nodes": "1:4"})
    seen = run.ended()
    assert seen.phase is Phase.SUCCEEDED, run.everything()
    assert [run.log(rank).split() for rank in range(2)] == [[str(rank), "2", "2"] for rank in range(2)]
    assert len(seen.hosts) == 2
    assert seen.exit is not None
    assert seen.exit.complete
    assert json.loads((run.directory / "agent.json").read_text())["nnodes"] == 2
    assert (run.directory / "agent.json").stat().st_mode & 0o777 == 0o600
    assert len(run.backend.entries(run.handle)) == 2


@pytest.mark.parametrize("spelling", ["gpus-per-task", "gpus-per-node"])
def test_gpus_come_however_they_are_asked_for(runs, spelling: str) -> None:
    slurm = {"partition": "gpu", "gpu_type": "a100", "gpus_as": spelling, "mem": 0}
    script = "import os; print(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
    run = runs.start(script, resources={"nodes": 2, "gpus_per_node": 2, "options": {"slurm": slurm}})
    assert run.ended().phase is Phase.SUCCEEDED, run.everything()
    assert [run.log(rank).strip() for rank in range(4)] == ["2"] * 4


def test_the_job_sees_no_variable_of_the_submitting_shell_but_its_secrets(runs, monkeypatch) -> None:
    monkeypatch.setenv("LEAK", "of the shell")
    monkeypatch.setenv("SBATCH_PARTITION", "nope")
    script = "import os; print(os.environ.get('LEAK'), os.environ['TOKEN'], os.environ['COLOUR'])"
    run = runs.start(script, secrets={"TOKEN": "s3cret"}, env={"COLOUR": "blue"})
    assert run.ended().phase is Phase.SUCCEEDED, run.everything()
    assert run.log(0).split() == ["None", "s3cret", "blue"]
    assert not (run.directory / "secrets.json").exists()
    assert "s3cret" not in runs.slurm.run("scontrol", "show", "job", "-dd", run.handle.native_id)


def test_secrets_do_not_outlive_agents_that_were_killed(runs) -> None:
    run = runs.start("import time; time.sleep(600)", secrets={"TOKEN": "s3cret"})
    run.awaited(Phase.RUNNING)
    assert (run.directory / "secrets.json").exists()
    runs.slurm.run("scancel", "--signal=KILL", "--full", run.handle.native_id)
    run.ended()
    assert not (run.directory / "secrets.json").exists()


def test_a_variable_can_be_passed_on_by_name(runs, monkeypatch) -> None:
    monkeypatch.setenv("PASSED", "on")
    monkeypatch.setenv("LEAK", "of the shell")
    script = "import os; print(os.environ.get('LEAK'), os.environ['PASSED'])"
    run = runs.start(script, resources={"options": {"slurm": {"export": ["PASSED"]}}})
    assert run.ended().phase is Phase.SUCCEEDED, run.everything()
    assert run.log(0).split() == ["None", "on"]


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope", "`sinfo` lists the partitions"),
        ({"account": "closed"}, "AssocMaxSubmitJobLimit", "another `account`"),
        ({"qos": "nope"}, "Invalid qos specification", "set `qos`"),
        ({"gres": ["dragon:1"]}, "Invalid generic resource", "Check `gres`"),
        ({"constraint": "nope"}, "Invalid feature specification", "`constraint`"),
        ({"extra": ["--no-such-option"]}, "unrecognized option '--no-such-option'", "`extra`"),
    ],
)
def test_what_slurm_refuses_is_refused_with_its_words_and_a_hint(runs, options, said, hint) -> None:
    run = runs.prepare(OK, secrets={"TOKEN": "x"}, resources={"options": {"slurm": options}})
    with pytest.raises(BackendError) as caught:
        run.submit()
    assert type(caught.value) is BackendError
    assert said in caught.value.what
    assert hint in caught.value.hint
    assert not (run.directory / "secrets.json").exists()
    assert runs.slurm.jobs(run.plan.marker) == []


def test_a_job_that_waits_says_why_and_whether_it_ever_ends(runs) -> None:
    run = runs.start(OK, resources={"nodes": 5})
    assert run.handle is not None
    seen = run.awaited(Phase.PENDING)
    eventually(lambda: "it may wait for ever" in run.poll().reason)
    assert seen.exit is None
    run.cancel(5)
    assert run.ended().phase is Phase.CANCELLED


def test_a_job_cancelled_while_waiting_never_runs(runs) -> None:
    run = runs.start(OK, resources={"options": {"slurm": {"begin": "now+1hour"}}})
    assert run.awaited(Phase.PENDING).reason == "BeginTime"
    run.cancel(5)
    seen = run.ended()
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    run.cancel(5)  # again does no harm
    assert not (run.directory / "node-0").exists()


def test_a_job_cancelled_with_scancel_is_cancelled_and_says_by_whom(runs) -> None:
    run = runs.start(SLEEP)
    run.until_said("up")
    runs.slurm.run("scancel", run.handle.native_id)
    seen = run.ended()
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert seen.reason.startswith("cancelled in Slurm")


@pytest.mark.slow
def test_the_grace_of_a_cancellation_is_the_user_s_not_slurm_s(runs) -> None:
    script = """
import signal, sys, time
def save(*_):
    time.sleep(9)  # longer than the cluster's KillWait of 5 seconds
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    time.sleep(0.1)
"""
    run = runs.start(script, resources={"nodes": 2})
    run.until_said("up", rank=0)
    run.until_said("up", rank=1)
    run.cancel(20)
    assert run.ended().phase is Phase.CANCELLED
    assert [run.log(rank).split() for rank in (0, 1)] == [["up", "saved"]] * 2


@pytest.mark.slow
def test_slurm_ends_what_a_hung_agent_does_not(runs) -> None:
    run = runs.start(SLEEP)
    run.until_said("up")
    agent = json.loads((run.directory / "node-0" / "pids.json").read_text())["agent"]["pid"]
    node = run.poll().hosts[0]
    # The node has a PID namespace of its own, so the agent is stopped from inside.
    runs.slurm.run(
        "srun", "--overlap", f"--jobid={run.handle.native_id}", f"--nodelist={node}", "kill", "-STOP", str(agent)
    )
    run.cancel(0)
    seen = run.ended(timeout_s=60)
    assert seen.phase is Phase.CANCELLED


def test_a_script_that_never_gets_to_its_agents_is_a_launch_failure(runs) -> None:
    cluster = runs.cluster.model_copy(update={"python": "/nonexistent/python"})
    runs.cluster = cluster
    run = runs.start(OK)
    seen = run.ended()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.LAUNCH)
    assert "logs/launcher.log" in seen.reason
    # The reason is where people look first, and the whole log is one of the attempt's.
    assert "/nonexistent/python" in seen.reason.partition("\n")[2]
    assert run.backend.log_selectors(run.handle) == [LogSelector(launcher=True)]
    (chunk,) = run.backend.logs(run.handle, LogSelector(launcher=True))
    assert chunk.data == (run.directory / "logs" / "launcher.log").read_bytes()


def test_without_accounting_the_records_and_the_queue_do(runs) -> None:
    run = runs.start(OK, cluster={"accounting": False})
    assert run.ended().phase is Phase.SUCCEEDED
    assert run.backend.find(run.plan.marker).native_id == run.handle.native_id


# Says that it has run, and goes on until it is told to end.
ONCE = """
import os, time
job = os.environ["ORC_JOB_DIR"]
with open(job + "/ran", "a") as ran:
    ran.write("x")
while not os.path.exists(job + "/go"):
    time.sleep(0.1)
"""


def sbatch_again(runs, run, *options: str) -> Handle:
    """What a submission that was cut off and repeated leaves behind: one more job with the same marker."""
    *words, script = run.plan.commands[0].argv
    job_id = runs.slurm.run(*words, *options, script)
    return Handle("testbed", "slurm", run.plan.marker, job_id, time.time())


def go(run) -> None:
    (run.directory.parent / "go").touch()


def test_two_jobs_with_one_marker_become_one(runs) -> None:
    run = runs.start(ONCE)
    second = sbatch_again(runs, run, "--hold")  # what it does when it gets to run is shown below
    assert second.native_id != run.handle.native_id
    assert run.backend.find(run.plan.marker).native_id == run.handle.native_id
    go(run)
    assert run.ended().phase is Phase.SUCCEEDED
    runs.slurm.await_state(second.native_id, "CANCELLED")
    assert (run.directory.parent / "ran").read_text() == "x"
    assert run.backend.find(run.plan.marker).native_id == run.handle.native_id


def test_a_second_job_that_got_to_run_does_nothing_and_is_seen_as_the_first(runs) -> None:
    run = runs.start(ONCE)
    eventually((run.directory / "node-0" / "lease.json").exists)
    first, run.handle = run.handle, sbatch_again(runs, run)
    runs.slurm.await_state(run.handle.native_id, "FAILED")  # the lease is held: exit status 76
    assert run.poll().phase is Phase.RUNNING
    go(run)
    seen = run.ended()
    assert seen.phase is Phase.SUCCEEDED
    assert (run.directory.parent / "ran").read_text() == "x"
    assert run.backend.poll([first])[first].phase is Phase.SUCCEEDED


def test_many_attempts_are_polled_with_two_commands(runs, tmp_path) -> None:
    counted = tmp_path / "bin"
    counted.mkdir()
    for name in ("squeue", "sacct"):
        (counted / name).write_text(f'#!/bin/sh\necho {name} >>{tmp_path}/calls\nexec /usr/bin/{name} "$@"\n')
        (counted / name).chmod(0o755)
    started = [runs.start(OK) for _ in range(3)]
    for run in started:
        run.ended()
    backend, _, _ = runs.render(OK, cluster={"bin": str(counted)})
    # A job that the controller has forgotten: only accounting, or nobody, can tell.
    forgotten = Handle("testbed", "slurm", "orc-gone-a1", "999999", time.time())
    seen = backend.poll([run.handle for run in started] + [forgotten])
    assert [seen[run.handle].phase for run in started] == [Phase.SUCCEEDED] * 3
    assert seen[forgotten].phase is Phase.UNKNOWN
    # The first time, it turns out which fields this version's accounting has.
    (tmp_path / "calls").write_text("")
    assert backend.poll([run.handle for run in started] + [forgotten])[forgotten].phase is Phase.UNKNOWN
    assert (tmp_path / "calls").read_text().split() == ["squeue", "sacct"]


def test_a_reused_job_number_is_not_taken_for_ours(runs) -> None:
    run = runs.start(SLEEP)
    run.awaited(Phase.RUNNING)
    other = Handle("testbed", "slurm", "orc-other-a1", run.handle.native_id, time.time())
    assert run.backend.poll([other])[other].phase is Phase.UNKNOWN
    run.backend.cancel([other], timedelta(0))
    assert run.poll().phase is Phase.RUNNING


def test_a_silent_controller_is_unreachable_for_every_question_and_the_job_does_not_mind(runs) -> None:
    run = runs.start(ONCE)
    eventually((run.directory / "node-0" / "lease.json").exists)
    impatient, _, _ = runs.render(OK, cluster={"query_timeout": 1})
    another = runs.prepare(OK, secrets={"TOKEN": "x"}, cluster={"query_timeout": 1})
    with runs.slurm.silent_controller():
        began = time.monotonic()
        with pytest.raises(BackendUnreachable, match="did not answer within 1 s"):
            impatient.poll([run.handle])
        assert time.monotonic() - began < 15
        with pytest.raises(BackendUnreachable, match="squeue did not answer within 1 s"):
            impatient.entries(run.handle)
        errors = [f for f in another.backend.preflight(another.plan) if f.level == "error"]
        with pytest.raises(BackendUnreachable):
            another.submit()
    assert [f.what for f in errors] == ["sinfo did not answer within 1 s"]
    assert run.backend.find(another.plan.marker) is None
    assert not another.directory.exists()
    go(run)
    assert run.ended().phase is Phase.SUCCEEDED


def controller_fails_at_sbatch(runs, directory, how: str) -> str:
    """A directory of Slurm commands in which *how* happens to the controller just before sbatch talks to it."""
    directory.mkdir()
    for name in ("srun", "squeue", "scancel", "scontrol", "sacct", "sinfo"):
        (directory / name).symlink_to(shutil.which(name))
    pid = (runs.slurm.directory / "run" / "slurmctld.pid").read_text().split()[0]
    how = how.replace("PID", pid)
    (directory / "sbatch").write_text(f'#!/bin/sh\n{how}\nexec {shutil.which("sbatch")} "$@"\n')
    (directory / "sbatch").chmod(0o755)
    return str(directory)


def test_a_submission_into_silence_is_ambiguous_and_found_later(runs, tmp_path) -> None:
    commands = controller_fails_at_sbatch(runs, tmp_path / "bin", "kill -STOP PID")
    run = runs.prepare(OK, cluster={"bin": commands, "query_timeout": 5, "submit_timeout": 5})
    with runs.slurm.silent_controller(at_once=False):
        with pytest.raises(AmbiguousSubmit, match="did not answer within 5 s"):
            run.submit()
        with pytest.raises(BackendUnreachable):
            run.backend.find(run.plan.marker)
    # The request waited in the controller's socket and was served when the controller woke up.
    run.handle = eventually(lambda: run.backend.find(run.plan.marker), timeout_s=run.backend.visibility_s)
    assert run.ended().phase is Phase.SUCCEEDED
    assert len(runs.slurm.jobs(run.plan.marker)) == 1


def test_preflight_likes_what_works(runs) -> None:
    run = runs.prepare(OK)
    (finding,) = run.backend.preflight(run.plan)
    assert finding.level == "info"
    assert finding.what.startswith("slurm")


def test_preflight_names_what_would_not_work(runs) -> None:
    run = runs.prepare(OK, resources={"options": {"slurm": {"partition": "nope"}}})
    errors = [f for f in run.backend.preflight(run.plan) if f.level == "error"]
    assert [f.what for f in errors] == ["no partition 'nope'"]
    assert "cpu, gpu, short, spot, spotgrace" in errors[0].hint


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"nodes": 9}, "the job asks for 9 nodes, partition (default) has 4"),
        ({"cpus_per_proc": 99}, "the job asks for 99 cores per node, the largest node of partition (default) has 8"),
        (
            {"time": "2m", "options": {"slurm": {"partition": "short"}}},
            "the job asks for 0:02:00, partition short allows 0:01:00",
        ),
    ],
)
def test_preflight_refuses_what_would_wait_for_ever(runs, resources, said) -> None:
    run = runs.prepare(OK, resources=resources)
    assert [f.what for f in run.backend.preflight(run.plan) if f.level == "error"] == [said]


def test_preflight_sees_a_root_that_cannot_be_written(runs, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    runs.cluster = runs.cluster.model_copy(update={"root": str(tmp_path / "file" / "root")})
    backend, plan, _ = runs.render(OK)
    errors = [f for f in backend.preflight(plan) if f.level == "error"]
    assert [f.what for f in errors] == [f"{tmp_path}/file cannot be written"]
