"""Environments, the doctor, and looking into jobs, through the command line and on real hosts over SSH."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.hosts

SCRIPT = """\
import os, socket, sys, time
import tiny
def ordinary():
    while True: time.sleep(0.05)
def odd():
    while True: time.sleep(0.05)
print("started", sys.executable, tiny.VALUE, flush=True)
(odd if os.environ["RANK"] == "1" else ordinary)()
"""
JOB = """\
name: watched
script: train.py
launcher: python
cluster: lab
environment: {copy: venv}
resources: {nodes: 2, procs_per_node: 2}
env: {GREETING: "hello there"}
"""


def clusters(hosts: Any, home: Path, **options: Any) -> None:
    """clusters.yaml with the hosts as the cluster lab."""
    cluster = hosts.cluster(connect_timeout=8, **options).model_dump(exclude_defaults=True)
    name = cluster.pop("name")
    (home / "config").mkdir(parents=True, exist_ok=True)
    (home / "config" / "clusters.yaml").write_text(yaml.safe_dump({name: json.loads(json.dumps(cluster))}))


@pytest.fixture
def venv(job_file: Callable[..., str]) -> Path:
    """The laptop's virtual environment beside the job file: one module, one script."""
    folder = Path(job_file(JOB)).parent
    (folder / "train.py").write_text(SCRIPT)
    path = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    site = next((path / "lib").glob("python*/site-packages"))
    (site / "tiny.py").write_text("VALUE = 42\n")
    (path / "bin" / "tiny").write_text(f"#!{path}/bin/python\nimport sys, tiny\nprint(tiny.VALUE, sys.prefix)\n")
    (path / "bin" / "tiny").chmod(0o755)
    return path


def started(orc: Any, job_id: str, ranks: int = 4) -> None:
    deadline = time.monotonic() + 240
    while orc("logs", job_id).out.count("started") < ranks:
        status = orc("status", job_id)
        assert time.monotonic() < deadline, status.out
        assert "FAILED" not in status.out, status.out + orc("logs", job_id, "--node", "0").out
        time.sleep(0.2)


def test_a_job_with_a_copied_environment_is_looked_into(
    hosts: Any, venv: Path, orc_process: Any, orc_home: Path
) -> None:
    clusters(hosts, orc_home)
    job = orc_process("submit", str(venv.parent / "job.yaml"), "--json").json["id"]
    started(orc_process, job)
    first, second = hosts.names[:2]
    done = orc_process(
        "exec", job, "--rank", "3", "--", "sh", "-c", 'hostname; echo "$GREETING|$RANK"; tiny; pwd; exit 7'
    )
    name, said, value, where = done.out.splitlines()
    assert (done.code, name, said) == (7, second, "hello there|3"), done.err
    assert value.startswith("42 /home/trainer/orc/envs/")
    assert where == f"/home/trainer/orc/jobs/{job}/work"
    shell = orc_process("ssh", job, "--node", "1", input="hostname; echo $GREETING; exit\n")
    assert shell.out.split("\n")[:2] == [second, "hello there"], shell.err
    done = orc_process("exec", job, "--node", "1", "--", "no-such-program")
    assert (done.code, done.err.splitlines()[-1]) == (125, "orc: no-such-program: No such file or directory")
    # What runs over there ends with the command that started it, however that ends.
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "exec", job, "--", "sh", "-c", "echo up; sleep 777"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert any("sleep 777" in command for command in hosts.processes(first).values())
        process.kill()
    deadline = time.monotonic() + 60
    while any("sleep 777" in command for command in hosts.processes(first).values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    done = orc_process("exec", job, "--all", "--", "hostname")
    assert sorted(done.out.splitlines()) == [f"[node 0] {first}", f"[node 1] {second}"]
    samples = [json.loads(line) for line in orc_process("top", "--once", "--json").out.splitlines()]
    assert [(s["host"], [r["rank"] for r in s["ranks"]]) for s in samples] == [(first, [0, 1]), (second, [2, 3])]
    done = orc_process("stacks", job, "--timeout", "60", "--json")
    assert done.code == 0, done.err
    assert [(g["ranks"], g["frames"][0][2]) for g in done.json["groups"]] == [([1], "odd"), ([0, 2, 3], "ordinary")]
    orc_process("cancel", job, "--grace", "1")
    assert orc_process("wait", job, "--timeout", "240").code == 3
    # The same environment once more: nothing of it is sent or built again.
    before = {path: path.stat().st_ino for path in (hosts.root(first) / "store" / "cas").iterdir()}
    again = orc_process("resubmit", job, "--json").json["id"]
    started(orc_process, again)
    assert {path: path.stat().st_ino for path in (hosts.root(first) / "store" / "cas").iterdir()} == before
    assert "is here already" in orc_process("logs", again, "--node", "0").out
    orc_process("cancel", again, "--grace", "1")
    assert orc_process("wait", again, "--timeout", "240").code == 3


def test_an_environment_that_does_not_fit_a_host_is_refused_there_with_the_reason(
    hosts: Any, venv: Path, orc_process: Any, orc_home: Path
) -> None:
    # A laptop with a newer C library: its Python says so.
    python = venv / "bin" / "python"
    python.unlink()
    python.write_text(f'#!/bin/sh\n{sys.executable} "$@" | sed \'s/"glibc", "[0-9.]*"/"glibc", "9.99"/\'\n')
    python.chmod(0o755)
    clusters(hosts, orc_home)
    job = orc_process("submit", str(venv.parent / "job.yaml"), "--json").json["id"]
    assert orc_process("wait", job, "--timeout", "240").code == 1
    reason = orc_process("status", job).out
    assert "it is made on glibc 9.99, this node has glibc 2." in reason
    assert not list(hosts.root(hosts.names[0]).glob("envs/*/bin"))


def test_the_doctor_keeps_jobs_off_a_bad_host(hosts: Any, venv: Path, orc_process: Any, orc_home: Path) -> None:
    clusters(hosts, orc_home)
    bad = hosts.names[0]
    hosts.fault("isolate", bad)
    found = orc_process("doctor", "--cluster", "lab", "--exclude-bad", "--json")
    # The all-reduce of a machine under load may find others slow.
    assert (found.code, found.json["bad"][bad]) == (1, "other hosts cannot talk to it")
    hosts.fault("heal", bad)
    shown = orc_process("render", str(venv.parent / "job.yaml"))
    assert shown.code == 0, shown.err
    job = orc_process("submit", str(venv.parent / "job.yaml"), "--json").json["id"]
    started(orc_process, job)
    assert bad not in orc_process("status", job, "--json").json["jobs"][0]["attempts"][0]["hosts"]
    orc_process("cancel", job, "--grace", "1")
    assert orc_process("wait", job, "--timeout", "240").code == 3
    # The next examination, without the fault, lets it back in.
    text = orc_process("doctor", "--cluster", "lab", "--no-network", "--exclude-bad")
    assert (text.code, "no host is excluded" in text.out) == (0, True)
