"""What `orc render` begins with: lines that start the same ranks when they are pasted into a shell."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import Run

JobFile = Callable[..., str]

RANKS = """\
name: pasted
command: [/bin/sh, -c, 'echo "$1 $GREETING rank $RANK of $WORLD_SIZE in $(basename "$PWD")"', sh, "it's {python}"]
launcher: python
secrets: [TOKEN]
setup: [echo prepared]
env: {GREETING: "a \\"{nnodes}\\" $x"}
resources: {procs_per_node: 2}
"""
TORCHRUN = "{name: t, script: t.py, args: {lr: 0.1, note: it's}, resources: {nodes: 3, procs_per_node: 2}}"


def test_the_lines_start_the_ranks_in_a_shell(orc: Run, job_file: JobFile) -> None:
    shown = orc("render", job_file(RANKS)).out
    (line,) = orc("render", job_file(RANKS), "--json").json["command_lines"]
    assert shown.startswith("# what runs on node 0 of 1\n")
    assert "# first export the secrets: TOKEN\n" in shown
    assert line["command"] in shown
    done = subprocess.run(["/bin/sh", "-c", line["command"]], capture_output=True, text=True, check=True)
    ranks = [f'it\'s {{python}} a "{{nnodes}}" $x rank {rank} of 2 in job' for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == [*ranks, "prepared"]


def test_each_node_has_its_own_torchrun_that_knows_what_is_known(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file(TORCHRUN)
    (place / "job" / "t.py").touch()
    lines = orc("render", path, "--json").json["command_lines"]
    assert [line["node"] for line in lines] == [0, 1, 2]
    for line in lines:
        directory, command = line["command"].split("\n", 1)
        words = shlex.split(command)
        assert directory == f"cd {place}/job"
        assert {"--nnodes=3", f"--node-rank={line['node']}", "--nproc-per-node=2"} <= set(words)
        assert words[-5:] == ["t.py", "--lr", "0.1", "--note", "it's"]
        assert '--master-addr="$MASTER_ADDR"' in command
        assert "first set MASTER_ADDR: the address of node 0" in line["notes"]


def test_of_many_nodes_the_first_ones_are_shown(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file(TORCHRUN)
    (place / "job" / "t.py").touch()
    shown = orc("render", path, "--set", "resources.nodes=64").out
    assert "# what runs on node 3 of 64\n" in shown
    assert "# what runs on node 4 of 64" not in shown
    assert "# nodes 4 to 63: the same with their own numbers\n" in shown


def test_hosts_are_named_and_their_addresses_filled_in(
    orc: Run, job_file: JobFile, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = place / "clusters.yaml"
    clusters.write_text(
        "lab: {kind: ssh, root: /data/orc, python: /opt/py, options: {hosts: [{name: a, address: 10.0.0.1},"
        " {name: b, address: 10.0.0.2}]}}\n"
    )
    path = job_file(TORCHRUN)
    (place / "job" / "t.py").touch()
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    lines = orc("render", path, "--cluster", "lab", "--set", "resources.nodes=2", "--json").json["command_lines"]
    assert [line["host"] for line in lines] == ["a", "b"]
    assert all("--master-addr=10.0.0.1 " in line["command"] for line in lines)
    assert all("/opt/py -m torch.distributed.run " in line["command"] for line in lines)


def test_a_launcher_of_node_0_alone_is_shown_once(orc: Run, job_file: JobFile, place: Path) -> None:
    path = job_file("{name: t, script: t.py, launcher: mpirun, resources: {nodes: 2}}")
    (place / "job" / "t.py").touch()
    (line,) = orc("render", path, "--json").json["command_lines"]
    assert "first write $ORC_ATTEMPT_DIR/hostfile: node-0 slots=1; node-1 slots=1" in line["notes"]
    assert "exec mpirun " in line["command"]
