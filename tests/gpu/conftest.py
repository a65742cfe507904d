"""Tests on one GPU: they need torch, pytest and the checkout. `make test-gpu` skips itself where there is no GPU."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from orc.runtime.testing import isolated

ON = os.environ.get("ORC_GPU_TESTS_ON", "cuda")


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
