"""One node: environment, preparation, supervision, and the record of how it went."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from polling import until

from orc.launchers.agent import state
from orc.launchers.agent.config import AgentConfig
from orc.launchers.agent.node import Node
from orc.launchers.agent.processes import decode_wait_status, kill_attempt, shell_exit_status, spawn
from orc.launchers.agent.procfs import process_start
from orc.launchers.agent.records import NODE_RECORD_BYTES, log_tail, write_json
from orc.launchers.agent.variables import substitute

from .conftest import AGENT, IDLE


def test_an_agent_is_small(attempt):
    job = attempt("import time; time.sleep(600)")
    process = job.start()
    until(lambda: (job.record("heartbeat.json") or {}).get("state") == "running")
    status = Path(f"/proc/{process.pid}/status").read_text()
    resident_kb = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert resident_kb < 40 * 1024
    process.terminate()
    process.wait(60)


def test_later_sources_of_the_environment_win(attempt):
    job = attempt(
        "import json, os; print(json.dumps(dict(os.environ)))",
        command={
            "spawn": "ranks",
            "launcher": [],
            "program": ["{python}", "train.py"],
            "env": {"A": "command", "B": "command", "ADDR": "{master_addr}:{nnodes}"},
        },
        env={"B": "env", "C": "env", "RANK": "9", "PYTHONPATH": "/mine"},
        secrets=["C", "D"],
    )
    (job.directory / "secrets.json").write_text(json.dumps({"C": "secret", "D": "secret", "E": "not asked for"}))
    assert job.run(A="agent", Z="agent", ORC_MARKER="of another job", MASTER_PORT="1") == 0
    seen = json.loads(job.log())
    assert {name: seen[name] for name in "ABCDZ"} == {
        "A": "command",
        "B": "env",
        "C": "secret",
        "D": "secret",
        "Z": "agent",
    }
    assert "E" not in seen
    assert seen["ADDR"] == "127.0.0.1:1"
    assert seen["RANK"] == "0"
    assert seen["ORC_MARKER"] == "orc-job-1-a1"
    assert seen["MASTER_PORT"] != "1"
    assert seen["PYTHONPATH"] == f"{job.config['runtime_tree']}:/mine"
    assert (seen["PYTHONUNBUFFERED"], seen["OMP_NUM_THREADS"]) == ("1", os.environ.get("OMP_NUM_THREADS", "1"))
    assert not (job.directory / "secrets.json").exists()


def test_what_the_job_sets_for_python_and_threads_is_kept(attempt):
    job = attempt(
        "import os; print(os.environ['PYTHONUNBUFFERED'] + os.environ['OMP_NUM_THREADS'])",
        env={"PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "7"},
    )
    assert job.run() == 0
    assert job.log() == "7\n"


def test_ranks_keep_the_users_umask_and_records_are_private(attempt):
    job = attempt("import os; m = os.umask(0); print(oct(m))")
    before = os.umask(0o027)
    try:
        assert job.run() == 0
    finally:
        os.umask(before)
    assert job.log() == "0o27\n"
    for path in ("logs/rank-0.log", "logs/node-0.log", "node-0/exit.json", "node-0/lease.json"):
        assert stat.S_IMODE((job.directory / path).stat().st_mode) == 0o600, path


def test_the_working_copy_is_writable_keeps_modes_and_links_and_is_made_once(attempt):
    job = attempt(
        """
        import os
        open("data/readonly.txt", "a").write("changed")
        open("new.txt", "w").write("x")
        print(os.readlink("link"), os.access("tool.sh", os.X_OK))
        raise SystemExit(75)
        """
    )
    tree = Path(job.config["code_tree"])
    (tree / "data").mkdir()
    (tree / "data/readonly.txt").write_text("original ")
    (tree / "tool.sh").write_text("#!/bin/sh\n")
    (tree / "link").symlink_to("data/readonly.txt")
    (tree / "tool.sh").chmod(0o555)
    (tree / "data/readonly.txt").chmod(0o444)
    (tree / "data").chmod(0o555)
    try:
        assert job.run(owner="x:1") == 75
        assert job.run(owner="x:1", restart=1) == 75
    finally:
        (tree / "data").chmod(0o755)
    work = job.root / "jobs/job-1/work"
    assert job.log() == "data/readonly.txt True\n" * 2
    assert (work / "data/readonly.txt").read_text() == "original changedchanged"
    assert (tree / "data/readonly.txt").read_text() == "original "
    assert stat.S_IMODE((work / "tool.sh").stat().st_mode) == 0o755
    assert [p.name for p in work.parent.iterdir() if "tmp" in p.name] == []


def test_a_missing_snapshot_is_a_failed_launch_with_the_reason(attempt):
    job = attempt("pass", code_tree="/nowhere/at/all")
    assert job.run() == 77
    record = job.exit()
    assert record["outcome"] == "launch"
    assert "/nowhere/at/all" in record["reason"]
    assert not (job.root / "jobs/job-1/work").exists()


def test_secrets_that_are_gone_are_a_failed_launch_that_names_no_value(attempt):
    job = attempt("pass", secrets=["TOKEN"])
    assert job.run() == 77
    assert "secrets" in job.exit()["reason"]
    (job.directory / "secrets.json").write_text(json.dumps({"OTHER": "value-4711"}))
    assert job.run(restart=1) == 77
    assert "TOKEN" in job.exit()["reason"]
    assert "value-4711" not in json.dumps(job.exit())


def test_an_interpreter_that_does_not_exist_is_a_failed_launch(attempt):
    job = attempt("pass", python="/no/such/python3")
    assert job.run() == 77
    assert job.exit()["outcome"] == "launch"
    assert job.exit()["reason"] == "cannot start /no/such/python3: No such file or directory"


@pytest.mark.parametrize("config", ["", "[]", '{"format": 99}'])
def test_orders_that_cannot_be_followed_are_refused(tmp_path, config):
    path = tmp_path / "agent.json"
    path.write_text(config)
    done = subprocess.run(
        [sys.executable, "-I", "-S", AGENT, "node", path, "--owner", "x"], capture_output=True, text=True
    )
    assert done.returncode == 77
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["node"], ["node", "x", "--owner"], ["fly", "x", "--owner", "y"], ["gang", "x"]]
)
def test_a_wrong_command_line_shows_the_usage(arguments):
    done = subprocess.run([sys.executable, "-I", "-S", AGENT, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_a_setup_line_sees_the_environment_and_stops_at_the_first_error(attempt):
    job = attempt("print('never')", setup=["false; echo unreachable"], env={"X": "1"})
    assert job.run() == 77
    assert job.exit()["reason"].startswith("setup on node 0 failed: `false; echo unreachable` exited with 1")
    assert "\nunreachable" not in job.node_log()
    assert job.log() == ""


def test_sigterm_is_forwarded_and_ranks_that_saved_were_preempted(attempt):
    job = attempt(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("saving", flush=True), time.sleep(0.2), sys.exit(75)))
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
        """,
        nproc=2,
    )
    process = job.started(ranks=2)
    process.terminate()
    assert process.wait(60) == 75
    assert job.exit()["outcome"] == "preempted"
    assert job.exit()["reason"] == "preempted (SIGTERM)"
    assert "saving" in job.log(1)


def test_a_preempted_job_that_did_not_save_says_so_and_still_wants_to_run_again(attempt):
    job = attempt(IDLE)
    process = job.started()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75
    assert job.exit()["reason"] == "preempted (SIGUSR1); not saved: rank 0 was killed by SIGTERM"
    assert job.exit()["ranks"]["0"]["signal"] == "SIGTERM"


def test_a_scheduler_that_signals_everybody_at_once_is_a_preemption_too(attempt):
    job = attempt(IDLE, nproc=2)
    process = job.started(ranks=2)
    for pid in job.remains():
        os.kill(pid, signal.SIGTERM)  # the ranks first
    process.terminate()
    assert process.wait(60) == 75
    assert job.exit()["outcome"] == "preempted"


def test_finishing_in_spite_of_a_notice_is_success(attempt):
    job = attempt(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
        """
    )
    process = job.started()
    process.terminate()
    assert process.wait(60) == 0
    assert job.exit()["outcome"] == "succeeded"


def test_the_rank_that_failed_first_is_named_by_an_agent_that_comes_late(attempt):
    job = attempt(
        """
        import os, sys, time
        rank = os.environ["RANK"]
        print("ready", flush=True)
        while not os.path.exists(f"../go-{rank}"):
            time.sleep(0.01)
        sys.exit(40 + int(rank))
        """,
        nproc=2,
    )
    process = job.started(ranks=2)
    until(lambda: (job.record("heartbeat.json") or {}).get("state") == "running")  # and has noted what it started
    process.send_signal(signal.SIGSTOP)
    sessions = [session["pid"] for session in job.record("pids.json")["sessions"]]
    for rank in (1, 0):
        (job.root / f"jobs/job-1/go-{rank}").touch()
        until(lambda rank=rank: process_start(sessions[rank]) is None)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 41
    assert job.exit()["reason"] == "rank 1 exited with 41"


def test_one_rank_that_leaves_with_75_gives_the_others_time_to_leave_too(attempt):
    job = attempt(
        """
        import os, sys, time
        time.sleep(0.2 + 0.6 * int(os.environ["RANK"]))  # the second one saves for longer, with no signal handler
        print("saved", flush=True)
        sys.exit(75)
        """,
        nproc=2,
    )
    assert job.run() == 75
    assert job.exit()["outcome"] == "preempted"
    assert job.log(1) == "saved\n"


def test_sigterm_during_a_cancellation_is_a_cancellation(attempt):
    job = attempt(IDLE)
    process = job.started()
    (job.directory / "cancel.json").write_text('{"grace_s": 5, "at": 0, "reason": "by ada"}')
    process.terminate()
    assert process.wait(60) == 143
    assert (job.exit()["outcome"], job.exit()["reason"]) == ("cancelled", "by ada")


def test_the_deadline_ends_the_node_with_124(attempt):
    job = attempt("import time; time.sleep(600)", deadline_s=0.5)
    assert job.run() == 124
    assert (job.exit()["outcome"], job.exit()["reason"]) == ("timeout", "time limit of 0.5 s reached")


def test_what_escaped_from_its_session_is_found_when_the_agent_is_gone(attempt):
    job = attempt(
        """
        import subprocess, sys, time
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    process = job.started()
    process.kill()
    process.wait()
    until(lambda: len(job.remains()) == 1, what="only the escaped process to be left")
    assert kill_attempt(str(job.directory)) == 1
    assert job.remains() == []


def test_a_full_disk_costs_the_log_tail_but_not_the_record(attempt, monkeypatch, capfd):
    job = attempt("pass")
    node = Node(AgentConfig(job.config), 0, "x:1")
    os.makedirs(node.dir)
    (job.directory / "logs").mkdir()
    node.log_fd = os.open(job.directory / "logs/node-0.log", os.O_WRONLY | os.O_CREAT)
    node.reserve()
    write, seen = write_json, []

    def on_a_full_disk(path, data, **options):
        reserved = os.path.exists(os.path.join(node.dir, ".reserve"))
        seen.append((reserved, len(json.dumps(data))))
        if reserved or len(json.dumps(data)) > 5000:
            raise OSError(28, "No space left on device", path)
        write(path, data, **options)

    monkeypatch.setattr(state, "write_json", on_a_full_disk)
    failure = {"rank": 1, "exit_code": 3, "log_tail": "x" * 8000}
    node.record({"outcome": "crash", "reason": "rank 1 exited with 3", "exit_status": 3, "first_failure": failure})
    assert job.exit()["first_failure"] == {"rank": 1, "exit_code": 3, "log_tail": ""}
    assert [reserved for reserved, _ in seen] == [True, False, False]
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 1 MiB")
def test_ranks_that_fill_the_disk_leave_a_full_record(attempt, tmp_path):
    job = attempt("x")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        job.config["attempt_dir"] = str(small / "a1")
        job.write(
            command={
                "spawn": "ranks",
                "launcher": [],
                "program": ["{python}", "-c", "while True: print('x' * 5000, flush=True)"],
                "env": {},
            }
        )
        assert job.run() == 1
        record = job.exit()
        assert record["outcome"] == "crash"
        assert record["first_failure"]["rank"] == 0
        assert record["ranks"]["0"]["exit_code"] == 1
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_log_tail_is_forty_lines_and_whole_ones(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    assert log_tail(str(path)).splitlines() == [f"line {i}" for i in range(60, 100)]
    path.write_text("a" * 5000 + "\n" + "b" * 5000 + "\nlast\n")
    assert log_tail(str(path)) == "b" * 5000 + "\nlast"
    path.write_bytes(b"\xff\xfe broken\n")
    assert log_tail(str(path)).endswith("broken")
    path.write_text("before\nafter\n")
    assert log_tail(str(path), start=7) == "after"
    assert log_tail(str(tmp_path / "none")) == ""


def test_secrets_are_blotted_out_of_the_failure_that_travels(attempt):
    job = attempt("import os; raise RuntimeError('bad token ' + os.environ['TOKEN'])", secrets=["TOKEN"])
    (job.directory / "secrets.json").write_text(json.dumps({"TOKEN": "geheim-4711"}))
    assert job.run() == 1
    assert job.exit()["first_failure"]["log_tail"].endswith("RuntimeError: bad token ***")
    assert "geheim-4711" not in json.dumps(job.exit())


def test_progress_travels_in_the_heartbeat_and_a_broken_file_does_no_harm(attempt):
    job = attempt(IDLE)
    process = job.started()
    progress = job.directory / "node-0/progress.json"
    progress.write_text('{"step": 1')
    time.sleep(0.5)
    progress.write_text('{"step": 7}')
    beat = until(lambda: (b := job.record("heartbeat.json")) and b["progress"] == {"step": 7} and b)
    assert (beat["state"], beat["ranks_alive"]) == ("running", 1)
    progress.write_text(json.dumps({"step": 8, "notes": "x" * NODE_RECORD_BYTES}))
    until(lambda: (b := job.record("heartbeat.json")) and not b["progress"])
    assert (job.directory / "node-0/heartbeat.json").stat().st_size < NODE_RECORD_BYTES
    process.terminate()
    process.wait(60)


def test_only_known_placeholders_are_filled_in():
    assert substitute("{a} {b} {{a}} {", {"a": "1"}) == "1 {b} {1} {"


def test_exit_statuses_are_told_like_a_shell_does():
    assert decode_wait_status(42 << 8) == (42, None)
    assert decode_wait_status(9) == (None, "SIGKILL")
    assert decode_wait_status(40) == (None, "SIG40")
    assert shell_exit_status(None, "SIGKILL") == 137
    assert shell_exit_status(None, "SIG40") == 168
    assert shell_exit_status(3, None) == 3


def test_ranks_do_not_ignore_what_a_background_shell_ignores(tmp_path: Path) -> None:
    source = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with (tmp_path / "out").open("wb") as out:
            pid = spawn([sys.executable, "-c", source], os.environ, output=out.fileno())
            os.waitpid(pid, 0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "out").read_text() == "True\n"
