"""Command lines of container runtimes, pinned; what they need to keep of secrets; a stand-in that is really run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.environments import container

GOLDEN = Path(__file__).parents[1] / "golden" / "environments"
SPECS: dict[str, dict[str, Any]] = {
    "docker": {
        "runtime": "docker",
        "image": "pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime",
        "mounts": ["/data:/data:ro"],
        "gpus": 8,
    },
    "podman": {
        "runtime": "podman",
        "image": "registry.lab/torch:2.4",
        "options": ["--cap-add", "SYS_PTRACE"],
        "gpus": 1,
    },
    "podman-no-gpu": {"runtime": "podman", "image": "registry.lab/torch:2.4"},
    "apptainer": {"runtime": "apptainer", "image": "/shared/torch.sif", "mounts": ["/data"], "gpus": 4},
}


def render(spec: dict[str, Any], uid: int = 1000, **options: Any) -> list[str]:
    environ = [
        "PATH",
        "HOME",
        "SSH_AUTH_SOCK",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "PYTHONPATH",
        "WANDB_API_KEY",
        "LR",
    ]
    return container.run_argv(
        spec,
        ["python3", "train.py", "--name", "two words"],
        variables=container.passed(environ, ["WANDB_API_KEY", "LR"]),
        workdir="/home/me/orc/jobs/digits-k3f9a2/work",
        mounts=["/home/me/orc", "/home/me/orc/jobs/digits-k3f9a2/checkpoints", "/scratch/checkpoints", ""],
        home="/home/me/orc/jobs/digits-k3f9a2/home",
        name="orc-digits-k3f9a2-a1-r0-n0-3-77",
        marker="orc-digits-k3f9a2-a1",
        node=0,
        user=(uid, uid),
        **options,
    )


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_infiniband_and_the_right_to_pin_memory_go_into_the_container(runtime: str) -> None:
    argv = render(SPECS[runtime], devices=["/dev/infiniband"])
    assert argv[argv.index("/dev/infiniband") - 1] == "--device"
    assert argv.index("/dev/infiniband") < argv.index("--entrypoint")
    assert ("memlock=-1" if runtime == "docker" else "host") in argv
    assert "/dev/infiniband" not in render(SPECS["apptainer"], devices=["/dev/infiniband"])


def lines(name: str) -> str:
    return shlex.join(render(SPECS[name])).replace(" --", " \\\n    --") + "\n"


@pytest.mark.parametrize("name", SPECS)
def test_the_command_line_is_as_pinned(name: str) -> None:
    assert lines(name) == (GOLDEN / f"{name}.txt").read_text()


def test_values_of_variables_are_never_on_the_command_line() -> None:
    argv = render(SPECS["docker"])
    assert argv[argv.index("WANDB_API_KEY") - 1] == "--env"
    given = [word for word in argv if "=" in word and not word.startswith(("HOME=", "orc.node=", "memlock=", "stack="))]
    assert given == []


def test_what_belongs_to_the_node_stays_outside() -> None:
    environ = [
        "PATH",
        "HOME",
        "LD_LIBRARY_PATH",
        "SSH_AUTH_SOCK",
        "DISPLAY",
        "NCCL_DEBUG",
        "ORC_RESTART",
        "OMPI_X",
        "A",
    ]
    assert container.passed(environ, ["A", "B"]) == ["A", "NCCL_DEBUG", "OMPI_X", "ORC_RESTART"]
    # What the job sets on purpose goes in, whatever it is.
    assert "LD_LIBRARY_PATH" in container.passed(environ, ["LD_LIBRARY_PATH"])


def test_root_needs_no_user_mapping_with_podman() -> None:
    assert "--userns" in render(SPECS["podman-no-gpu"])
    assert "--userns" not in render(SPECS["podman-no-gpu"], uid=0)


# Understands as much of docker as is needed to run the program: on this machine instead of in an image.
DOCKER = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
with open(os.path.join(os.path.dirname(sys.argv[0]), "calls"), "a") as file:
    file.write(" ".join(words) + "\\n")
if words[0] == "image":
    sys.exit(0 if os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "image")) else 1)
if words[0] == "pull":
    if words[1] == "gone":
        print("manifest unknown")
        sys.exit(1)
    open(os.path.join(os.path.dirname(sys.argv[0]), "image"), "w").close()
if words[0] == "run":
    names = [words[i + 1] for i, word in enumerate(words) if word == "--env"]
    env = dict(name.split("=", 1) if "=" in name else (name, os.environ.get(name, "")) for name in names)
    program = [words[words.index("--entrypoint") + 1], *words[words.index("img") + 1:]]
    os.chdir(words[words.index("--workdir") + 1])
    os.execvpe(program[0], program, {{**env, "PATH": os.environ["PATH"], "INSIDE": "1"}})
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    return program


def test_an_image_is_fetched_once_and_ranks_run_in_it(node: Any, docker: Path) -> None:
    here, search = node("a"), {"PATH": f"{docker.parent}:/usr/bin:/bin"}
    spec = {"kind": "container", "runtime": "docker", "image": "img", "python": "python3"}
    for _ in range(2):
        status, output = here.prepare(env=search, **spec)
        assert status == 0, output
    calls = (docker.parent / "calls").read_text()
    assert calls.count("pull img") == 1
    prefix = here.answer["prefix"]
    own = {"ORC_ATTEMPT_DIR": str(here.attempt), "ORC_NODE_RANK": "0", "RANK": "3", "SSH_AUTH_SOCK": "x"}
    env = {**os.environ, **search, **own}
    code = (
        "import os, sys; print(sys.argv[1:], os.environ['INSIDE'], os.environ['RANK'], 'SSH_AUTH_SOCK' in os.environ)"
    )
    argv = [*prefix, sys.executable, "-c", code, "two words", "--x"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, cwd=here.code)
    assert done.stdout.strip() == "['two words', '--x'] 1 3 False", done.stderr
    home = here.root / "jobs/job-1/home"
    assert home.is_dir()
    assert f"HOME={home}" in (docker.parent / "calls").read_text()


def test_an_image_or_a_runtime_that_is_not_there_is_told(node: Any, docker: Path) -> None:
    here, search = node("a"), {"PATH": f"{docker.parent}:/usr/bin:/bin"}
    assert here.prepare(env=search, kind="container", runtime="docker", image="gone", python="python3")[0] == 1
    assert here.answer["error"] == "fetching the image gone failed with exit status 1:\nmanifest unknown"
    assert here.prepare(env=search, kind="container", runtime="apptainer", image="/x.sif", python="python3")[0] == 1
    assert here.answer["error"] == "apptainer is not installed on this node (not on PATH)"
