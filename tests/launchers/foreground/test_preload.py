"""One process imports torch and forks the ranks of ``orc launch``: when, and that nobody can tell."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polling import until

from orc.launchers.agent.procfs import process_start
from orc.launchers.foreground.launch import begins_with_torch, shadows_a_library

from .test_launch import DRIVER, start


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", True),
        ('"""Trains."""\nfrom __future__ import annotations\nimport os, sys\nimport torch.nn as nn\nprint(1)', True),
        ("import argparse\nimport numpy as np\nfrom torch import nn", True),
        ("from orc.runtime import Accelerator", True),
        ("import json; import torch", True),
        ("print('hello')\nimport torch", False),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", False),
        ("import time\nt = time.time()\nimport torch", False),
        ("if True:\n    import torch", False),
        ("def f():\n    import torch\nf()", False),
        ("import yaml\nimport torch", False),
        ("from . import x\nimport torch", False),
        ("import torchvision", False),
        ("import os\n# torch", False),
        ("import torch\nthis is no python", False),
        ("import \0torch", False),
        ("#" + "x" * (1 << 20) + "\nimport torch", False),
    ],
)
def test_only_a_script_that_begins_with_torch_is_preloaded(source, expected):
    assert begins_with_torch(source.encode()) is expected


def test_files_beside_the_script_that_stand_in_front_of_libraries_forbid_it():
    assert not shadows_a_library({"train", "model", "data"})
    for name in ("random", "torch", "numpy", "types"):
        assert shadows_a_library({"train", name})


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.Popen[str]]:
    """Launch a script whose torch is a small module that notes each import in ``imports``."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "code").mkdir()
    (tmp_path / "lib").mkdir()
    monkeypatch.chdir(tmp_path / "code")

    def launched(source: str, *arguments: str, torch: str = "", **options: Any) -> subprocess.Popen[str]:
        (tmp_path / "code/train.py").write_text(textwrap.dedent(source))
        note = f"open({str(tmp_path / 'imports')!r}, 'a').write('x')\n"
        (tmp_path / "lib/torch.py").write_text(note + textwrap.dedent(torch))
        environ = {"PYTHONPATH": str(tmp_path / "lib")}
        return start("train.py", *arguments, environ=environ, **{"nprocs": 3, **options})

    return launched


def imports(tmp_path: Path) -> int:
    return len((tmp_path / "imports").read_text())


SEEN = """
import torch
import json, os, sys
import __main__
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ORC_PRELOAD", "ORC_START_GATE"]
state = {
    "env": {n: os.environ.get(n) for n in names if n != "MASTER_PORT"},
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path0": sys.path[0], "name": __name__, "file": __file__,
    "spec": repr(__spec__), "loader": type(__loader__).__name__, "main": __main__.__dict__ is globals(),
    "command": open("/proc/self/cmdline").read().split("\\0")[1:-1], "stdin": os.read(0, 9).decode(),
    "fds": len(os.listdir("/proc/self/fd")), "group": os.getpgrp() == os.getpgid(os.getppid()),
    "signals": [line for line in open("/proc/self/status") if line[:6] in ("SigBlk", "SigIgn", "SigCgt")],
}
os.write(1, (json.dumps(state) + "\\n").encode())
"""


def states(process: subprocess.Popen[str]) -> list[Any]:
    out, err = process.communicate("typed", timeout=60)
    assert process.returncode == 0, err
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda state: state["env"]["RANK"])


def test_forked_ranks_look_like_ranks_that_were_started_alone(launch, tmp_path):
    forked = states(launch(SEEN, "--lr", "0.1"))
    assert imports(tmp_path) == 1
    alone = states(launch("0 or 1\n" + SEEN, "--lr", "0.1"))  # begins with an expression
    assert imports(tmp_path) == 1 + 3
    assert forked == alone
    assert [state["stdin"] for state in forked] == ["typed", "", ""]


def test_forked_ranks_draw_different_random_numbers(launch, tmp_path):
    process = launch(
        "import torch\nimport os, random\nos.write(1, f'{random.random()}\\n'.encode())", torch="import random"
    )
    out, _ = process.communicate(timeout=60)
    assert len(set(out.split())) == 3
    assert imports(tmp_path) == 1


def test_the_traceback_and_the_failing_rank_are_as_ever(launch, tmp_path):
    source = """
    import torch
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError("no")
    time.sleep(600)
    """
    process = launch(source)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    path = tmp_path / "code/train.py"
    assert err == (
        f'Traceback (most recent call last):\n  File "{path}", line 5, in <module>\n'
        '    raise ValueError("no")\nValueError: no\norc launch: rank 1 exited with 1\n'
    )
    assert imports(tmp_path) == 1


def test_processes_that_a_rank_spawns_can_import_its_functions(launch, tmp_path):
    source = """
    import torch
    import multiprocessing
    def square(x):
        return x * x
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(square, [2, 3]) == [4, 9]
    """
    process = launch(source, nprocs=2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


ONLY_ONCE = """
import os, signal
if len(open({imports!r}).read()) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("torch", "status", "said"),
    [
        ("raise RuntimeError('broken build')", 1, "RuntimeError: broken build"),
        ("raise SystemExit(3)", 3, "rank"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()", 0, ""),
        (ONLY_ONCE, 0, ""),
    ],
    ids=["fails", "exits", "starts a thread", "is killed once"],
)
def test_where_preloading_does_not_work_the_ranks_are_started_alone(launch, tmp_path, torch, status, said):
    process = launch("import torch\nprint('fine')", torch=torch.replace("{imports!r}", repr(str(tmp_path / "imports"))))
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out.count("fine") == (0 if status else 3)
    assert said in err
    assert imports(tmp_path) > 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_preloading_ends_the_launch(launch, tmp_path, number):
    process = launch("import torch\nprint('never')", torch="import time\ntime.sleep(600)")
    until(lambda: (tmp_path / "imports").exists() and imports(tmp_path))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "", f"orc launch: stopped by {number.name}\n")
    assert imports(tmp_path) == 1


def test_forked_ranks_die_with_a_killed_launcher(launch, tmp_path):
    process = launch("import torch\nimport os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)")
    pids = [int(process.stdout.readline()) for _ in range(3)]
    process.kill()
    until(lambda: not any(process_start(pid) for pid in pids))
    process.communicate()
    assert imports(tmp_path) == 1


@pytest.mark.distributed
def test_real_torch_is_imported_once_and_the_ranks_reduce(launch, tmp_path):
    source = """
    import time
    import torch
    import torch.distributed as dist
    import os
    cpu_s = time.process_time()  # starts from nothing in a forked process
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    y = torch.ones(300, 300) @ torch.ones(300, 300)
    os.write(1, f"{int(x)} {int(y[0, 0])} {cpu_s < 0.3}\\n".encode())
    dist.destroy_process_group()
    """
    (tmp_path / "code/train.py").write_text(textwrap.dedent(source))
    argv = [sys.executable, "-c", DRIVER, '{"nprocs": 2}', "train.py"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2 300 True\n" * 2), done.stderr
