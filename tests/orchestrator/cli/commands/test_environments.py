"""Jobs that bring or build their environment, on this machine, through the command line."""

from __future__ import annotations

import os
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = """\
name: own-python
script: train.py
launcher: python
resources: {nodes: 2}
"""
SCRIPT = (
    "import os, sys; print('rank', os.environ['RANK'], os.environ.get('CONDA_PREFIX'), os.path.exists('env.tar.gz'))\n"
)


@pytest.fixture
def folder(job_file: Callable[..., str]) -> Path:
    """A job's directory with its script."""
    directory = Path(job_file(JOB)).parent
    (directory / "train.py").write_text(SCRIPT)
    return directory


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that comes first on the PATH."""
    directory = tmp_path / "programs"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return directory


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_an_archive_of_conda_pack_travels_and_is_unpacked_once(orc: Any, folder: Path, orc_home: Path) -> None:
    home = folder.parent / "prefix" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)
    program(home / "conda-unpack", "import sys\n")
    program(home / "only-here", "#!/bin/sh\n")
    with tarfile.open(folder / "env.tar.gz", "w:gz") as tar:
        tar.add(home, "bin")
    (folder / "job.yaml").write_text(JOB + "environment: {conda: env.tar.gz}\nsetup: [only-here]\n")
    for _ in range(2):
        done = orc("submit", str(folder / "job.yaml"), "--follow", "--all-ranks")
        assert done.code == 0, done.err
    (made,) = [path for path in (orc_home / "state/envs").iterdir() if path.is_dir()]
    # The archive lies in the store once and not in the working copy.
    assert f"rank 1 {made} False" in done.out
    job = orc("status", "@last", "--json").json["jobs"][0]
    assert set(job["digests"]) == {"code", "runtime", "environment"}
    logs = [orc("logs", "@last", "--node", str(node)).out for node in (0, 1)]
    assert all("is here already" in text for text in logs)
    shown = orc("render", str(folder / "job.yaml"), "--json").json
    assert shown["trees"]["environment"] == job["digests"]["environment"]


def test_what_cannot_be_built_ends_the_job_with_the_reason(orc: Any, folder: Path, orc_home: Path) -> None:
    (folder / "requirements.txt").write_text("-e ./lib\n")
    (folder / "job.yaml").write_text(JOB + "environment: {venv: requirements.txt}\n")
    assert orc("submit", str(folder / "job.yaml"), "--follow").code == 1
    job = orc("status", "@last", "--json").json["jobs"][0]
    assert (job["attempts"][0]["cause"], len(job["attempts"])) == ("launch", 1)
    assert "no environment on node" in job["reason"]
    assert "requirements.txt:1: an editable install belongs to one working copy" in job["reason"]
    assert not list((orc_home / "state").glob("envs/*/"))


@pytest.mark.parametrize(
    ("environment", "key", "column"),
    [
        ("{venv: requirements.txt}", "venv.requirements", 21),
        ("{venv: {requirements: requirements.txt}}", "venv.requirements", 36),
        ("{conda: requirements.yml}", "conda.file", 22),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_that_does_not_travel_is_refused_before_anything_is_sent(
    orc: Any, folder: Path, environment: str, key: str, column: int, exists: bool
) -> None:
    name = "requirements.txt" if "txt" in environment else "requirements.yml"
    if exists:
        (folder / name).write_text("numpy\n")
        (folder / ".orcignore").write_text("requirements.*\n")
    (folder / "job.yaml").write_text(JOB + f"environment: {environment}\n")
    done = orc("submit", str(folder / "job.yaml"), "--json")
    assert done.code == 2
    assert done.error["what"] == f"environment.{key} = {name}: there is no such file in the snapshot of the workdir"
    line = JOB.count("\n") + 1
    assert done.error["where"].endswith(f"job.yaml:{line}:{column}")
    assert orc("list", "--json").json["jobs"] == []


def test_a_cancelled_build_leaves_nothing(orc: Any, folder: Path, orc_home: Path, programs: Path) -> None:
    program(programs / "micromamba", '#!/bin/sh\nmkdir -p "$4/bin"\nexec sleep 600\n')
    (folder / "environment.yml").write_text("dependencies: [python]\n")
    text = JOB.replace("nodes: 2", "nodes: 1") + "environment: {conda: environment.yml}\n"
    (folder / "job.yaml").write_text(text)
    job = orc("submit", str(folder / "job.yaml"), "--json").json["id"]
    deadline = time.monotonic() + 120
    while not (begun := list((orc_home / "state").glob("envs/*/bin"))):
        assert time.monotonic() < deadline, orc("logs", job, "--node", "0").out
        time.sleep(0.05)
    orc("cancel", job, "--grace", "10")
    assert orc("wait", job, "--timeout", "120").code == 3
    assert not begun[0].parent.exists()


# Stands in for docker: runs the program here, with the variables that were named and nothing else.
DOCKER = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
here = os.path.dirname(os.path.abspath(sys.argv[0]))
with open(os.path.join(here, "calls"), "a") as file:
    file.write(" ".join(words) + "\\n")
if words[0] == "run":
    names = [words[i + 1] for i, word in enumerate(words) if word == "--env"]
    env = dict(name.split("=", 1) if "=" in name else (name, os.environ.get(name, "")) for name in names)
    program = [words[words.index("--entrypoint") + 1], *words[words.index("img") + 1:]]
    os.chdir(words[words.index("--workdir") + 1])
    env = {{**env, "PATH": os.environ["PATH"], "INSIDE": "1", "OMP_NUM_THREADS": "1"}}
    os.execvpe(program[0], program, env)
"""


@pytest.mark.parametrize("launcher", ["python", pytest.param("torchrun", marks=pytest.mark.distributed)])
def test_ranks_run_in_their_container(
    launcher: str, orc: Any, folder: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs / "docker", DOCKER)
    monkeypatch.setenv("TOKEN", "s3cret")
    (folder / "train.py").write_text(
        "import os\nnames = ('RANK', 'WORLD_SIZE', 'INSIDE', 'TOKEN', 'LR', 'SSH_AUTH_SOCK')\n"
        "print('rank', *[os.environ.get(name) for name in names])\n"
    )
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent")
    (folder / "job.yaml").write_text(
        JOB.replace("launcher: python", f"launcher: {launcher}").replace("nodes: 2", "procs_per_node: 2")
        + "env: {LR: '0.1'}\nsecrets: [TOKEN]\n"
        + f"environment: {{container: {{image: img, python: {sys.executable}}}}}\n"
    )
    done = orc("submit", str(folder / "job.yaml"), "--follow", "--all-ranks")
    assert done.code == 0, done.err + orc("logs", "@last", "--node", "0").out
    assert sorted(line.partition("] ")[2] for line in done.out.splitlines()) == [
        f"rank {rank} 2 1 s3cret 0.1 None" for rank in (0, 1)
    ]
    calls = (programs / "calls").read_text()
    assert calls.count("run --rm") == (2 if launcher == "python" else 1)
    assert "s3cret" not in calls
    job = orc("status", "@last", "--json").json["jobs"][0]["id"]
    assert f"ps --all --quiet --filter label=orc.node=orc-{job}-a1-n0" in calls


def test_deepspeeds_launcher_cannot_be_contained(orc: Any, folder: Path) -> None:
    text = JOB.replace("launcher: python", "launcher: deepspeed") + "environment: {container: img}\n"
    (folder / "job.yaml").write_text(text)
    done = orc("render", str(folder / "job.yaml"))
    assert done.code == 2
    assert "launcher deepspeed cannot start its ranks in containers" in done.err
