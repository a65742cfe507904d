"""What is rendered for mpirun in its dialects; ``mpirun`` itself is a script that tells what it was given."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

FACTS = {"{world_size}": "4", "{nproc}": "2", "{node_addr}": "10.0.0.1"}
VERSIONS = {
    "openmpi": "mpirun (Open MPI) 4.1.4",
    "mpich": "HYDRA build details:\n    Version: 4.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.13",
}


@pytest.fixture
def start(tmp_path: Path, build):
    """Run what is rendered; what mpirun was given, and the variables that it saw."""

    def start(
        version: str, options: dict[str, object] | None = None, program: str = "mpirun"
    ) -> tuple[list[str], dict]:
        directory = tmp_path / "attempt dir's"
        directory.mkdir()
        fake = tmp_path / program
        fake.write_text(
            f"#!/bin/sh\n[ \"$1\" != --version ] || {{ echo '{version}'; exit; }}\n"
            'python3 -c "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))" "$@"\n'
        )
        fake.chmod(0o755)
        command = build("mpirun", options, resources={"nodes": 2, "procs_per_node": 2})
        argv = list(command.launcher)
        for name, value in FACTS.items():
            argv[2] = argv[2].replace(name, value)
        env = {
            **os.environ,
            **command.env,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ORC_ATTEMPT_DIR": str(directory),
        }
        done = subprocess.run([*argv, "shim", "a b"], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        words, seen = json.loads(done.stdout)
        return words, seen

    return start


def pairs(words: list[str], flag: str) -> dict[str, str]:
    return {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == flag}


def test_open_mpi_is_recognised_and_given_its_own_words(start, tmp_path) -> None:
    words, _ = start(VERSIONS["openmpi"])
    assert words[-2:] == ["shim", "a b"]
    assert words[:8] == [
        *("--hostfile", f"{tmp_path}/attempt dir's/hostfile", "-n", "4"),
        *("--map-by", "ppr:2:node", "--bind-to", "none"),
    ]
    assert ("--allow-run-as-root" in words) == (os.getuid() == 0)
    mca = pairs(words, "--mca")
    assert (mca["plm"], mca["plm_rsh_agent"]) == ("rsh", "ssh")
    assert mca["oob_tcp_keepalive_time"] == "5"


def test_open_mpi_5_has_other_words_for_the_same(start) -> None:
    words, _ = start("mpirun (Open MPI) 5.0.11", {"dialect": "openmpi"})
    mca = pairs(words, "--mca")
    assert (mca["plm"], mca["plm_ssh_agent"]) == ("ssh", "ssh")
    assert [name for name in mca if "rsh" in name or "orte" in name] == []
    assert "--leave-session-attached" in words


@pytest.mark.parametrize("dialect", ["mpich", "intel"])
def test_hydra_is_recognised_and_given_its_own_words(dialect, start, tmp_path) -> None:
    words, seen = start(VERSIONS[dialect])
    assert words[:6] == ["-f", f"{tmp_path}/attempt dir's/machinefile", "-n", "4", "-ppn", "2"]
    assert words[-2:] == ["shim", "a b"]
    assert words[words.index("-localhost") + 1] == "10.0.0.1"
    assert seen.get("I_MPI_PIN") == ("0" if dialect == "intel" else None)


def test_the_dialect_that_is_given_is_not_asked_for(start) -> None:
    words, seen = start("nobody knows", {"dialect": "intel", "bind_to": "socket", "program": "mpiexec"}, "mpiexec")
    assert words[0] == "-f"
    assert (seen["I_MPI_PIN"], seen["I_MPI_PIN_DOMAIN"]) == ("1", "socket")


def test_options_go_where_they_belong(start) -> None:
    options = {"mca": {"plm_rsh_agent": "blaunch", "a": "b c"}, "bind_to": "core", "arguments": ["--tag-output", "x y"]}
    words, _ = start(VERSIONS["openmpi"], options)
    assert words[words.index("--bind-to") + 1] == "core"
    mca = pairs(words, "--mca")
    assert (mca["plm_rsh_agent"], mca["a"]) == ("blaunch", "b c")
    assert words.count("plm_rsh_agent") == 1
    assert words[words.index("--tag-output") + 1] == "x y"


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ({}, {}),
        ({"ccl_worker_count": 2}, {"CCL_WORKER_COUNT": "2", "CCL_ATL_TRANSPORT": "ofi"}),
        ({"ccl_atl_transport": "mpi"}, {"CCL_WORKER_COUNT": "1", "CCL_ATL_TRANSPORT": "mpi"}),
    ],
)
def test_oneccl_is_set_up_when_asked_for(options, env, build) -> None:
    assert build("mpirun", options).env == env


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dialect": "openmp"}, "option dialect = 'openmp': expected one of auto, openmpi, mpich, intel, did you mean"),
        ({"bind-to": "core"}, "unknown option 'bind-to', did you mean 'bind_to'?"),
        ({"bind_to": "core; rm"}, "option bind_to = 'core; rm': expected one word"),
        ({"dialect": "intel", "map_by": "core"}, "option map_by is not Intel MPI's"),
        ({"dialect": "mpich", "mca": {"a": "b"}}, "option mca is Open MPI's, and the dialect is mpich"),
        ({"mpirun_hostfile": "/h"}, "option mpirun_hostfile cannot be given: it is written from the nodes"),
        ({"mpirun_ccl": "1"}, "option mpirun_ccl cannot be given: the number of oneCCL worker threads is ccl_worker_c"),
        ({"np": 4}, "option np cannot be given: it follows from resources.nodes and resources.procs_per_node"),
    ],
)
def test_what_cannot_be_done_is_refused(refusal, options, reason) -> None:
    assert refusal("mpirun", options).startswith(reason)
