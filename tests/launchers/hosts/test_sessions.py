"""How the nodes of each backend are entered."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orc.launchers import agent
from orc.launchers.backends.base import Handle, NodeEntry, SupportsExec
from orc.launchers.backends.local.backend import LocalBackend
from orc.launchers.backends.ssh.backend import SshBackend
from orc.launchers.hosts.session_probe import device_memory
from orc.launchers.hosts.sessions import on_node
from orc.launchers.spec.clusters import Cluster, builtin_local

OPTIONS = {
    "hosts": ["node1", {"name": "gpu3", "address": "10.0.0.3", "user": "me", "port": 2222, "via": "bastion"}],
    "ssh_config": "/home/me/.ssh/lab",
    "user": "trainer",
    "host_keys": "accept-new",
    "connect_timeout": 7,
}


def test_hosts_are_entered_with_openssh_and_the_clusters_options() -> None:
    cluster = Cluster(name="lab", kind="ssh", root="~/orc", python="/opt/venv/bin/python", options=OPTIONS)
    backend = SshBackend(cluster)
    assert isinstance(backend, SupportsExec)
    handle = Handle("lab", "ssh", "orc-x-abc123-a2", "~/orc/jobs/x-abc123/a2", 0.0, ("node1", "gpu3"))
    first, second = backend.entries(handle)
    common = "ssh -F /home/me/.ssh/lab -o StrictHostKeyChecking=accept-new -o ConnectTimeout=7 -o LogLevel=ERROR"
    alive = "-o ServerAliveInterval=7 -o ServerAliveCountMax=2"
    assert first.argv(["echo", "two words"]) == [
        *shlex.split(f"{common} -o BatchMode=yes {alive} -l trainer -T node1"),
        "echo 'two words'",
    ]
    wanted = f"{common} -o HostName=10.0.0.3 -l me -p 2222 -J bastion -t gpu3"
    assert second.argv(["sh"], terminal=True) == [*shlex.split(wanted), "sh"]
    assert (second.node, second.host, second.directory) == (1, "gpu3", "~/orc/jobs/x-abc123/a2")
    # What goes through the shells of both sides is one line without anything that they would expand.
    program, *words = shlex.split(on_node(first, ["echo", "$HOME"])[-1])
    assert (program, words[-1], "\n" in " ".join(words)) == ("/opt/venv/bin/python", "$HOME", False)


def test_a_python_in_the_home_directory_is_that_of_the_host() -> None:
    cluster = Cluster(name="lab", kind="ssh", python="~/my venv/bin/python", options={"hosts": ["a"]})
    (entry,) = SshBackend(cluster).entries(Handle("lab", "ssh", "orc-x-abc123-a1", "", 0.0, ("a",)))
    assert entry.argv([entry.python, "-c", "print('~/x')"])[-1].startswith("~/'my venv/bin/python' -c ")
    assert entry.argv(["echo", "~/x"])[-1] == "echo '~/x'"


def test_strict_host_keys_are_strict_for_openssh_too() -> None:
    backend = SshBackend(Cluster(name="lab", kind="ssh", options={"hosts": ["a"]}))
    (entry,) = backend.entries(Handle("lab", "ssh", "orc-x-abc123-a1", "", 0.0, ("a",)))
    assert "StrictHostKeyChecking=yes" in entry.prefix


def test_this_machine_needs_no_prefix(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text('{"nnodes": 2}')
    entries = LocalBackend(builtin_local()).entries(Handle("local", "local", "orc-x-a1", str(tmp_path)))
    assert [entry.node for entry in entries] == [0, 1]
    assert entries[0].argv(["echo", "a b"]) == ["echo", "a b"]


@pytest.mark.parametrize("terminal", [True, False])
def test_slurm_nodes_are_entered_with_one_more_step(terminal: bool, tmp_path: Path) -> None:
    from orc.launchers.backends.slurm.backend import SlurmBackend
    from orc.launchers.ids import AttemptId

    squeue = tmp_path / "bin/squeue"  # a controller that answers, and has forgotten the job
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\n")
    squeue.chmod(0o755)
    options = {"bin": str(squeue.parent)}
    backend = SlurmBackend(Cluster(name="hpc", kind="slurm", root=str(tmp_path), python="/opt/python", options=options))
    directory = Path(str(backend.layout.attempt(AttemptId("x-abc123", 1))))
    directory.mkdir(parents=True)
    (directory / "agent.json").write_text('{"nnodes": 2}')
    entry = backend.entries(Handle("hpc", "slurm", "orc-x-abc123-a1", "77"))[1]
    assert isinstance(entry, NodeEntry)
    last = "--pty" if terminal else "--unbuffered"
    step = f"{squeue.parent}/srun --jobid=77 --overlap --quiet --nodes=1 --ntasks=1 --relative=1 {last} hostname"
    assert entry.argv(["hostname"], terminal=terminal) == step.split()


def test_a_program_ends_when_nobody_listens_any_more(tmp_path: Path) -> None:
    """As over SSH without a terminal: the closed channel is all that the other side sees."""
    (tmp_path / "a1/node-0").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    tree = tmp_path / "tree" / "lib" / "orc" / "launchers"
    shutil.copytree(Path(agent.__file__).parent, tree / "agent")
    config = {
        "format": 1,
        "root": "/",
        "code_tree": "/",
        "job": "x",
        "name": "x",
        "attempt": 1,
        "marker": "orc-x-a1",
        "nnodes": 1,
        "nproc": 1,
        "env": {"A": "b c"},
        "command": {"spawn": "ranks"},
    }
    places = {"job_dir": tmp_path, "attempt_dir": tmp_path / "a1", "runtime_tree": tmp_path / "tree"}
    (tmp_path / "a1/agent.json").write_text(json.dumps({**config, **{k: str(v) for k, v in places.items()}}))
    entry = NodeEntry(0, "here", str(tmp_path / "a1"), sys.executable, ("/bin/sh", "-c"), through_shell=True)
    script = 'trap "" HUP; echo "$A"; while :; do sleep 0.1; done'
    with subprocess.Popen(on_node(entry, ["sh", "-c", script]), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"b c\n"
        process.stdout.close()
        assert process.wait(timeout=30) == 128 + signal.SIGKILL  # it would not listen to SIGHUP
    done = subprocess.run(on_node(entry, ["sh", "-c", "exit 9"]), stdout=subprocess.PIPE, check=False)
    assert done.returncode == 9


def test_the_memory_of_a_gpu_is_what_its_rank_has_told_of_in_numbers(tmp_path: Path) -> None:
    (tmp_path / "device-3.json").write_text('{"name": "L4", "memory_allocated": 3, "memory_reserved": "much"}')
    assert device_memory(str(tmp_path), "3") == {"memory_allocated": 3}
    assert device_memory(str(tmp_path), "4") == device_memory(str(tmp_path), "") == {}
