"""The start-up hook of the ranks changes what ``import torch`` costs and nothing that a program can see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orc.launchers.rank_hooks import startup

FAKE_TORCH = (
    "import gc\nloader, name, enabled = __loader__, __name__, gc.isenabled()\ncycles = [[] for _ in range(50_000)]\n"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "path"
    directory.mkdir()
    shutil.copy(startup.__file__, directory / "sitecustomize.py")
    return directory


def run(path: Path, program: str, *more: Path, **environ: str) -> str:
    """Program's output, with the hook first on the path and torch replaced by something small."""
    torch = path.parent / "lib"
    torch.mkdir(exist_ok=True)
    (torch / "torch.py").write_text(FAKE_TORCH)
    python_path = os.pathsep.join(str(p) for p in (path, *more, torch))
    env = {**os.environ, "PYTHONPATH": python_path, **environ}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_collector_rests_during_the_import_and_its_objects_are_set_aside(path):
    assert run(path, "import gc, torch; print(torch.enabled, gc.isenabled(), gc.get_freeze_count() > 50_000)") == (
        "False True True"
    )


def test_a_program_that_never_imports_torch_is_left_alone(path):
    assert run(path, "import gc, json; print(gc.isenabled(), gc.get_freeze_count())") == "True 0"


def test_it_can_be_turned_off(path):
    assert run(path, "import gc, torch; print(torch.enabled, gc.get_freeze_count())", ORC_FREEZE_IMPORT="0") == "True 0"


def test_a_collector_that_the_program_has_turned_off_stays_off(path):
    assert run(path, "import gc; gc.disable(); import torch; print(gc.isenabled())") == "False"


def test_the_module_looks_as_if_nothing_had_happened(path):
    program = """
import sys, importlib.util, importlib.machinery
assert importlib.util.find_spec("torch") is not None  # looking is not importing
import torch
assert type(torch.__loader__) is importlib.machinery.SourceFileLoader, torch.__loader__
assert torch.__loader__ is torch.__spec__.loader is torch.loader
assert "exec_module" not in vars(torch.__loader__)
assert not any(type(f).__name__ == "TorchFinder" for f in sys.meta_path)
import importlib
importlib.reload(torch)
import gc
print(gc.isenabled(), torch.__name__)
"""
    assert run(path, program) == "True torch"


def test_a_torch_that_is_not_there_fails_as_usual(path):
    program = """
import gc, sys
sys.path = [p for p in sys.path if "site-packages" not in p and not p.endswith("lib")]
try:
    import torch
except ModuleNotFoundError as error:
    print(gc.isenabled(), error.name)
"""
    assert run(path, program) == "True torch"


def test_a_torch_that_is_broken_fails_as_usual(path):
    (path.parent / "bad").mkdir()
    (path.parent / "bad/torch.py").write_text("raise RuntimeError('broken build')")
    program = """
import gc
try:
    import torch
except RuntimeError as error:
    print(gc.isenabled(), error)
"""
    assert run(path, program, path.parent / "bad") == "True broken build"


def test_another_sitecustomize_still_runs_and_keeps_its_name(path):
    other = path.parent / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins; builtins.customized = 7")
    program = "import builtins, sys; print(builtins.customized, sys.modules['sitecustomize'].__file__)"
    assert run(path, program, other) == f"7 {other / 'sitecustomize.py'}"


def start(path: Path, rank: int, gate: int, program: str) -> subprocess.Popen[str]:
    torch = path.parent / "lib"
    torch.mkdir(exist_ok=True)
    if not (torch / "torch.py").exists():  # another process may be reading it
        (torch / "torch.py").write_text("import time\nimported = time.monotonic()\n")
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{torch}", "RANK": str(rank), startup.GATE: str(gate)}
    argv = [sys.executable, "-c", program]
    return subprocess.Popen(argv, env=env, pass_fds=(gate,), stdout=subprocess.PIPE, text=True)


def test_the_others_let_rank_0_import_torch_first(path):
    hook = path / "sitecustomize.py"  # one that waits for as long as it takes on a busy machine
    hook.write_text(hook.read_text().replace(f"GATE_S = {startup.GATE_S}", "GATE_S = 60.0"))
    read, write = os.pipe()
    other = start(path, 1, read, "import time, torch; print(time.monotonic(), flush=True)")
    time.sleep(0.1)
    first = start(path, 0, write, "import time, torch; print(torch.imported, flush=True); time.sleep(1)")
    os.close(write)
    os.close(read)
    assert other.stdout is not None
    assert first.stdout is not None
    assert float(first.stdout.readline()) < float(other.stdout.readline())
    for process in (first, other):
        process.communicate()


def test_nobody_waits_long_for_a_rank_0_that_does_not_import_torch(path):
    read, write = os.pipe()
    program = "import time; began = time.monotonic(); import torch; print(time.monotonic() - began)"
    waited = float(start(path, 1, read, program).communicate()[0])
    os.close(read)
    os.close(write)
    assert startup.GATE_S <= waited < startup.GATE_S + 20


def test_the_gate_is_nothing_that_a_script_or_its_children_see(path):
    read, write = os.pipe()
    program = f"""
import os, subprocess, torch
print({startup.GATE!r} in os.environ)
try:
    os.fstat({read})
except OSError:
    print("closed")
"""
    os.close(write)
    assert start(path, 1, read, program).communicate()[0].split() == ["False", "closed"]
    before = f"import os; print(os.get_inheritable({read}))"
    assert start(path, 1, read, before).communicate()[0].strip() == "False"
    os.close(read)
    assert run(path, "import torch; print('fine')", **{startup.GATE: "77"}) == "fine"
