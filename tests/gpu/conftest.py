"""Tests on one GPU: they need torch, pytest and the checkout. `make test-gpu` skips itself where there is no GPU."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from orc.runtime.testing import isolated, run_ranks

ON = os.environ.get("ORC_GPU_TESTS_ON", "cuda")

# What this run has measured: name, value, unit.
_figures: list[tuple[str, float, str]] = []


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if ON != "cuda" and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def run():
    """Each test is a run of its own: no context, environment or memory of another one."""
    with isolated():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        if ON != "cuda":
            os.environ["ORC_USE_CPU"] = "1"
        yield
    if ON == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture
def device():
    """Device that the Accelerator chooses by itself."""
    return torch.device("cuda", torch.cuda.current_device()) if ON == "cuda" else torch.device("cpu")


@pytest.fixture
def allocated():
    """``allocated()``: bytes that tensors take on the device; 0 on the CPU, which does not count them.

    cuBLAS has its workspaces already, that of backward's thread too: they are kept, and on some GPUs take 32 MiB each.
    """
    if ON == "cuda":
        layer = torch.nn.Linear(64, 64, device="cuda")
        layer(torch.ones(4, 64, device="cuda", requires_grad=True)).sum().backward()
        del layer

    def count():
        if ON != "cuda":
            return 0
        gc.collect()  # models of other tests are in circles, which would go at any time
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    return count


@pytest.fixture
def compiler():
    """Back end of ``torch.compile``: inductor, where there are triton and the C compiler that it calls."""
    if ON != "cuda":
        return "aot_eager"
    from torch.utils._triton import has_triton

    if not has_triton() or not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        pytest.skip("torch.compile needs triton and a C compiler on GPUs")
    return "inductor"


@pytest.fixture
def form():
    """Arguments of `save_state`: weights as safetensors where that is installed, which these tests do not need."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        return {"safe_serialization": False}
    return {}


@pytest.fixture(scope="session")
def figure():
    """``figure(name, value, unit)`` keeps a measurement for the table at the end of the run."""

    def keep(name, value, unit):
        _figures.append((name, float(value), unit))

    return keep


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.cuda_only)])
def two_ranks(request):
    """``two_ranks(function, *args)``: results of both ranks; over gloo on one device, over NCCL on two where there are.

    The function gets the name of the backend first.
    """
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank, and there is one")
    env = {"ORC_USE_CPU": "1"}
    if ON == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        env = {"CUDA_VISIBLE_DEVICES": ",".join(visible[: 1 if request.param == "gloo" else 2])}

    def call(function, *args):
        return run_ranks(2, function, request.param, *args, env=env, timeout_s=120)

    return call


@pytest.fixture
def orc_command(tmp_path):
    """Start of a command line of ``orc`` from this checkout, and its environment."""
    try:
        import orc.orchestrator.cli.main  # noqa: F401
    except ImportError as error:
        pytest.skip(f"orc's own commands need more than torch: no {error.name}")
    env = {**os.environ, "ORC_STATE_DIR": str(tmp_path / "state"), "ORC_CONFIG_DIR": str(tmp_path / "config")}
    env |= {"ORC_RECONCILER": "off", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return [sys.executable, "-m", "orc.orchestrator.cli.main"], env


# ---- the table at the end


def pytest_terminal_summary(terminalreporter):
    """Print what ran where, the verdict on each file, and the figures; as Markdown, so that a page can have it."""
    reports = [
        (kind, report)
        for kind in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.stats.get(kind, [])
    ]
    text = "\n".join(_table(reports))
    terminalreporter.section("what ran, and figures")
    terminalreporter.write_line(text)
    if path := os.environ.get("ORC_GPU_REPORT"):
        Path(path).write_text(text + "\n")


def _table(reports):
    yield f"On {_machine()}:"
    yield ""
    yield "| tests | passed | failed | skipped | seconds |"
    yield "|---|---|---|---|---|"
    counts: dict[str, Counter[str]] = {}
    for kind, report in reports:
        counted = counts.setdefault(Path(report.nodeid.partition("::")[0]).stem, Counter())
        counted["failed" if kind == "error" else kind] += 1
        counted["milliseconds"] += round(1000 * report.duration)
    for name, counted in sorted(counts.items()):
        seconds = counted["milliseconds"] / 1000
        yield f"| {name} | {counted['passed']} | {counted['failed']} | {counted['skipped']} | {seconds:.1f} |"
    if _figures:
        yield ""
        yield "| figure | |"
        yield "|---|---|"
        yield from (f"| {name} | {value:.4g} {unit} |" for name, value, unit in _figures)


def _machine():
    place = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    if ON != "cuda":
        return f"the CPU, {place}"
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    cards = ", ".join(f"{count} x {name}" for name, count in names.items())
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return f"{cards}, driver {_driver()}, {place}, CUDA {torch.version.cuda}, NCCL {nccl}"


def _driver():
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return lines[0] if lines else "unknown"
