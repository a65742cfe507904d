"""One object in one file, and models without what was put around them."""

import io

import torch
from safetensors.torch import load as load_safetensors
from torch import nn

from orc.runtime import Accelerator, RunContext, extract_model_from_parallel, load, save, use_context


def test_the_main_process_saves(tmp_path):
    for rank in range(4):
        with use_context(RunContext.fake(rank, 4, nodes=2)):
            save({"rank": rank}, tmp_path / f"{rank}.bin")
            save({"rank": rank}, tmp_path / f"node-{rank}.bin", save_on_each_node=True)
            save({"rank": torch.tensor(rank)}, tmp_path / f"{rank}.safetensors", safe_serialization=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.bin", "0.safetensors", "node-0.bin", "node-2.bin"]
    assert load(tmp_path / "node-2.bin") == {"rank": 2}
    assert load(tmp_path / "0.safetensors")["rank"].item() == 0


def test_files_that_are_open_are_taken_as_torch_save_takes_them():
    for rank in range(2):
        pickled, safe = io.BytesIO(), io.BytesIO()
        with use_context(RunContext.fake(rank, 2)):
            save({"rank": rank}, pickled)
            Accelerator().save({"rank": torch.tensor(rank)}, safe, safe_serialization=True)
        if rank == 0:
            pickled.seek(0)
            assert load(pickled) == {"rank": 0}
            assert load_safetensors(safe.getvalue())["rank"].item() == 0
        else:
            assert pickled.getvalue() == safe.getvalue() == b""


def test_shared_tensors_are_saved_once(tmp_path):
    shared = torch.ones(3)
    save({"a": shared, "b": shared}, tmp_path / "x.safetensors", safe_serialization=True)
    assert list(load(tmp_path / "x.safetensors")) == ["a"]


def test_modules_inside_are_unwrapped_too():
    with use_context(RunContext.fake(0, 2)):
        accelerator = Accelerator()
        inner = nn.Linear(1, 1)
        outer = nn.Sequential(accelerator.prepare(inner), nn.ReLU())
        assert type(outer[0]).__name__ == "DistributedDataParallel"
        assert extract_model_from_parallel(outer)[0] is not inner
        assert extract_model_from_parallel(outer, recursive=True)[0] is inner
