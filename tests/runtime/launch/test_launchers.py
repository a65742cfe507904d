"""Functions launched from Python: their ranks, what they print, how they fail, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest
import torch

from orc.runtime import Accelerator, debug_launcher, launchers, notebook_launcher
from orc.runtime.core.errors import ContextError, LaunchError, RankFailure, SettingConflict
from orc.runtime.launch import xla


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not [c for c in left if "resource_tracker" not in " ".join(c.cmdline())]


def test_a_function_trains_on_two_ranks_and_prints_below_the_cell(capfd):
    unpicklable, folder = types.SimpleNamespace(close=lambda: "of the notebook"), os.getpid()

    def train(precision, steps):
        accelerator = Accelerator()
        assert accelerator.mixed_precision == precision
        total = accelerator.reduce(torch.ones(1) * (accelerator.process_index + 1))
        os.system("echo from a program")
        print(
            f"{accelerator.process_index}: {accelerator.num_processes} {total.item():g} {unpicklable.close()} {steps}"
        )
        assert os.getpid() != folder

    assert (
        notebook_launcher(train, ("bf16", 3), 2, mixed_precision="bf16", log_line_prefix_template="[${rank}] ") is None
    )
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "Launching training on 2 CPU processes."
    assert sorted(out[1:]) == [
        "[0] 0: 2 3 of the notebook 3",
        "[0] from a program",
        "[1] 1: 2 3 of the notebook 3",
        "[1] from a program",
    ]


def test_one_process_is_this_one_and_leaves_no_accelerator_behind(capsys):
    seen = []
    for precision in ("no", "bf16"):
        notebook_launcher(lambda p: seen.append((os.getpid(), Accelerator().mixed_precision, p)), (precision,), 1,
                          mixed_precision=precision)  # fmt: skip
    assert seen == [(os.getpid(), "no", "no"), (os.getpid(), "bf16", "bf16")]
    assert capsys.readouterr().out == "Launching training on CPU.\n" * 2


def test_the_failing_rank_comes_first_with_its_traceback_and_one_that_is_killed_is_named(capfd):
    def fails():
        state = Accelerator().state
        if state.process_index == 1:
            raise KeyError("lost")
        state.wait_for_everyone()

    with pytest.raises(RankFailure) as failure:
        debug_launcher(fails)
    text = str(failure.value)
    assert text.startswith("--- rank 1\nTraceback")
    assert "in fails" in text
    assert "KeyError: 'lost'" in text

    def dies():
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"^--- rank 1\nit was ended by SIGKILL \(out of memory\?\)\n--- rank 0\nwas stop"
    ):
        debug_launcher(dies)
    assert time.monotonic() - began < 60


def test_ranks_that_take_seconds_to_die_are_named_by_what_ended_them():
    def dies_slowly():
        os.closerange(3, 256)  # as the kernel does first, before it takes the memory of a GPU apart
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(
        RankFailure, match=r"^--- rank 0\nit was ended by SIGSEGV\n--- rank 1\nit was ended by SIGSEGV$"
    ):
        debug_launcher(dies_slowly)


def test_ranks_are_started_again_after_a_failure_as_often_as_was_asked_for(tmp_path, capfd):
    def train():
        Accelerator()
        mark = tmp_path / f"rank-{os.environ['RANK']}"
        with mark.open("a") as file:
            file.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "0" and mark.read_text() == "0":
            raise ValueError("the first time")

    notebook_launcher(train, num_processes=2, max_restarts=3, start_method="fork")
    assert (tmp_path / "rank-0").read_text() == "01"
    captured = capfd.readouterr()
    assert "restart 1 of 3" in captured.err
    assert "ValueError: the first time" in captured.err


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_notebooks_are_two_nodes_of_one_run(tmp_path, free_port, backend):
    program = """
import sys, torch
from orc.runtime import Accelerator, notebook_launcher
def train(text):
    accelerator = Accelerator()
    context = accelerator.state.ctx
    places = accelerator.gather(torch.tensor([context.rank * 10 + context.node_rank]))
    accelerator.print(places.tolist())
if __name__ == "__main__":
    node, port, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    notebook_launcher(train, ("x",), num_processes=1, num_nodes=2, node_rank=node, use_port=port, rdzv_backend=backend,
                      rdzv_endpoint=f"127.0.0.1:{port}", rdzv_id="two")
"""
    script = tmp_path / "notebook.py"
    script.write_text(program)
    port = str(free_port())
    both = [
        subprocess.Popen(
            [sys.executable, str(script), str(node), port, backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert all("[0, 11]" in text for text in said)


def test_what_cannot_be_launched_is_refused_with_the_reason(monkeypatch):
    def train():
        raise AssertionError("nothing is to be started")

    for arguments, said in (
        ({"num_processes": 0}, "at least one"),
        ({"num_processes": 2, "mixed_precision": "bf8"}, "bf8"),
        ({"num_nodes": 2, "node_rank": 2}, "node_rank=2 is not below num_nodes=2"),
        ({"num_processes": 2, "max_restarts": -1}, "max_restarts"),
        ({"num_processes": 2, "args": 3}, r"args=3 is no tuple; a single argument is written args=\(value,\)"),
        ({"num_processes": 2, "args": "abc"}, "args='abc' is no tuple"),
        ({"num_processes": 2, "use_port": "abc"}, "use_port='abc' is no port"),
        ({"num_processes": 2, "use_port": 65536}, "from 0 to 65535"),
        ({"num_processes": 2, "start_method": "clone"}, "fork, forkserver, spawn"),
        ({"num_processes": 2, "rdzv_backend": "carrier-pigeon"}, "carrier-pigeon"),
    ):
        with pytest.raises(ValueError, match=said):
            notebook_launcher(train, **arguments)
    monkeypatch.setattr(launchers, "_gpu_count", lambda: 2)
    with pytest.raises(LaunchError, match="num_processes=4, but this machine has 2 GPUs"):
        notebook_launcher(train, num_processes=4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ContextError, match="CUDA is in use by this process"):
        notebook_launcher(train)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "yes")
    with pytest.raises(LaunchError, match=r"cannot use CUDA:\n--- rank 0\nTraceback"):
        notebook_launcher(train)
    monkeypatch.delenv("ACCELERATE_DEBUG_MODE")
    Accelerator()
    with pytest.raises(SettingConflict, match="exists already in this process"):
        notebook_launcher(train, num_processes=2)


def test_ranks_to_debug_with_make_accelerators_of_their_own(capfd):
    accelerator = Accelerator()
    debug_launcher(lambda: print(Accelerator().gather(torch.ones(1)).tolist(), flush=True))
    assert capfd.readouterr().out == "[1.0, 1.0]\n" * 2
    assert (accelerator.num_processes, Accelerator().num_processes) == (1, 1)


def test_on_a_tpu_the_processes_are_those_of_torch_xla(monkeypatch, capsys):
    calls = []

    def launch(function, args, **options):
        function(0, *args)
        calls.append(options)

    monkeypatch.setattr(xla, "wanted", lambda env: True)
    monkeypatch.setattr(xla, "load", lambda: types.SimpleNamespace(root=types.SimpleNamespace(launch=launch)))
    seen = []
    for count in (None, 8, 1):
        notebook_launcher(lambda model: seen.append((model, os.environ["ORC_MIXED_PRECISION"])), ("model",), count,
                          mixed_precision="bf16")  # fmt: skip
    assert seen == [("model", "bf16")] * 3
    assert [call["debug_single_process"] for call in calls] == [False, False, True]
    assert {call["start_method"] for call in calls} == {"fork"}
    assert "ORC_MIXED_PRECISION" not in os.environ


def test_ctrl_c_ends_all_ranks_and_their_children(tmp_path):
    def train():
        subprocess.Popen(["sleep", "600"])
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(600)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(parent, signal.SIGINT)
        os._exit(0)

    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        interrupt()
    try:
        with pytest.raises(KeyboardInterrupt):
            debug_launcher(train)
    finally:
        os.waitpid(pid, 0)
    assert not [int(p.read_text()) for p in tmp_path.iterdir() if psutil.pid_exists(int(p.read_text()))]


def test_ranks_die_with_whoever_started_them(tmp_path):
    code = (
        "import os, time\nfrom orc.runtime import debug_launcher\n"
        "def train():\n"
        f"    open(f'{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "debug_launcher(train)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 100
    while len([p for p in tmp_path.iterdir() if p.read_text()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    pids = [int(p.read_text()) for p in tmp_path.iterdir()]
    while [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_notebook_launches_what_its_cells_define(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    cells = [
        "import torch\nfrom orc.runtime import Accelerator, notebook_launcher\nscale = 2.0",
        "def train(rate):\n"
        "    accelerator = Accelerator()\n"
        "    model = accelerator.prepare(torch.nn.Linear(1, 1))\n"
        "    if rate > 1: raise ValueError(f'rate {rate} on rank {accelerator.process_index}')\n"
        "    print('rank', accelerator.process_index, 'of', accelerator.num_processes, scale, type(model).__name__)",
        "notebook_launcher(train, (0.1,), num_processes=2)",
        "notebook_launcher(train, (0.2,), num_processes=2, start_method='forkserver')",
        "notebook_launcher(train, (5,), num_processes=2)",
    ]
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "run"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = {
        "kernel_name": "python3",
        "timeout": 150,
        "allow_errors": True,
        "resources": {"metadata": {"path": str(tmp_path)}},
    }
    nbclient.NotebookClient(notebook, **kernel).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    for number in (2, 3):
        lines = sorted("".join(one.text for one in outputs[number] if one.get("name") == "stdout").splitlines())
        assert lines == [
            "Launching training on 2 CPU processes.",
            "rank 0 of 2 2.0 DistributedDataParallel",
            "rank 1 of 2 2.0 DistributedDataParallel",
        ], outputs[number]
    error = next(one for one in outputs[4] if one.output_type == "error")
    assert error.ename == "RankFailure"
    assert "ValueError: rate 5 on rank" in error.evalue
    assert "--- rank 0" in error.evalue
    assert "--- rank 1" in error.evalue
