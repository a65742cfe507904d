"""What is rendered for DeepSpeed's launcher, and what it cannot do."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys

import pytest


def test_arguments_of_the_launcher_s_launcher_arrive_as_words(build) -> None:
    text = build("deepspeed", {"launcher": "pdsh", "launcher_args": ["-u", "5 0", "$x"]}).launcher[2]
    argv = ["/bin/sh", "-c", text.replace("exec ", "printf '%s\\n' "), "python", "shim"]
    done = subprocess.run(argv, env={"ORC_ATTEMPT_DIR": "/a b"}, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "--hostfile=/a b/hostfile" in lines
    (given,) = (line for line in lines if line.startswith("--launcher_args="))
    assert shlex.split(given.partition("=")[2]) == ["-u", "5 0", "$x"]


@pytest.mark.parametrize(
    ("settings", "index"),
    [({"script": "t.py"}, 2), ({"module": "pkg.t"}, 3), ({"command": ["./run", "fast"]}, 1)],
)
def test_local_rank_is_the_first_argument_of_the_program(settings, index, build) -> None:
    words = build("deepspeed", {"local_rank": True}, args=["a b"], **settings).program
    assert words[-1] == str(index)
    assert json.loads(base64.b64decode(words[-2]))[-1] == "a b"


def test_a_packed_program_is_run_with_the_words_that_were_given(build) -> None:
    words = ["a b", "$HOME", "it's", 'x"y', "%n", "\\", "", "{python}"]
    echo = ["{python}", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    program = list(build("deepspeed", {"launcher": "pdsh"}, args=words).program)
    packed = json.loads(base64.b64decode(program[-2]))
    assert packed == ["{python}", "train.py", *words]
    program[0], program[-2] = sys.executable, base64.b64encode(json.dumps([*echo, *words]).encode()).decode()
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == words


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"include": "node1"}, "option include needs launcher: pdsh; nodes are chosen when the job is placed"),
        ({"launcher": "openmpi", "exclude": "node1"}, "option exclude needs launcher: pdsh"),
        ({"launcher": "pdsh", "include": "a", "exclude": "b"}, "options include and exclude exclude each other"),
        ({"launcher_args": ["-x"]}, "option launcher_args is for pdsh, openmpi, mpich, impi, and the launcher is stan"),
        ({"launcher": "pdhs"}, "option launcher = 'pdhs': expected one of standard, slurm, pdsh, openmpi, mpich, impi"),
        ({"hostfile": "/h"}, "option hostfile cannot be given: it is written from the nodes of each attempt"),
        ({"num_gpus": 4}, "option num_gpus cannot be given: it follows from resources.procs_per_node"),
        ({"no_local_rank": True}, "option no_local_rank cannot be given: it is so already"),
        (
            {"deepspeed_multinode_launcher": "pdsh"},
            "option deepspeed_multinode_launcher cannot be given: the option is",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(refusal, options, reason) -> None:
    assert refusal("deepspeed", options).startswith(reason)


def test_a_shell_command_gets_no_local_rank(refusal) -> None:
    assert refusal("deepspeed", {"local_rank": True}, command="./run.sh").startswith("option local_rank cannot be put")


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "impi"])
def test_a_secret_that_deepspeed_would_show_is_refused(launcher, refusal, build) -> None:
    secrets = ["WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN"]
    reason = refusal("deepspeed", {"launcher": launcher}, secrets=secrets)
    assert (
        reason == "DeepSpeed would put the secret MLFLOW_TRACKING_TOKEN on a command line; launcher: standard does not"
    )
    assert build("deepspeed", secrets=secrets).primary == "each"
