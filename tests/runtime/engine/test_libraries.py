"""Libraries that train in torch's place: found by their folders and entry points, named nowhere else."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import orc.runtime
from orc.runtime import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from orc.runtime.core.errors import SettingConflict
from orc.runtime.core.fp8_settings import BACKENDS
from orc.runtime.core.libraries import libraries

ROOT = Path(orc.runtime.__file__).parent
# Where documented names of scripts, job files and variables have a library in them.
DOCUMENTED = {
    "__init__.py",
    "__init__.pyi",
    "accelerator.py",
    "attributes.py",
    "core/availability.py",  # is_deepspeed_available
    "core/config.py",  # sections of a job file
    "core/deepspeed_keys.py",
    "core/enums.py",  # DistributedType
    "core/fp8_recipes.py",  # MSAMPRecipeKwargs
    "core/fp8_settings.py",
    "core/megatron_keys.py",
    "core/parallelism.py",  # DeepSpeedSequenceParallelConfig
    "core/parallelism_settings.py",  # sp_backend
    "engine/deepspeed/plugin.py",  # enable_msamp
    "parallel/sequence.py",  # sp_backend
    "state.py",
    "stand_ins/names.py",  # modules of the package that the runtime stands in for
    "preparing.py",  # deepspeed_ulysses_dl_adapter
    "utils/__init__.py",
    "utils/deepspeed.py",
    "weights/parallel_memory.py",  # what to train a layout with
    "weights/quantization/bnb.py",  # what to train with instead
}


def names_and_strings(path):
    """Names and strings in the code of *path*, without docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value
        yield from (str(getattr(node, field, "")) for field in ("id", "attr", "arg", "name", "module"))


def test_no_library_is_named_outside_its_folder():
    assert libraries().keys() == {"deepspeed", "megatron"}
    precisions = "|".join(BACKENDS.values()).replace("msamp", "msamp(?!l)")
    own = [(name, ROOT / "engine" / name) for name in libraries()]
    own += [(precisions, ROOT / "parallel/precision/fp8"), ("torchao", ROOT / "weights/quantization")]
    named = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py*")
        for text in (names_and_strings(path) if path.suffix != ".pyc" else ())
        for found in re.findall("|".join([*libraries(), precisions]), text, re.IGNORECASE)
        if not any(re.fullmatch(names, found, re.IGNORECASE) and path.is_relative_to(folder) for names, folder in own)
    }
    assert sorted(named ^ DOCUMENTED) == []


def test_ways_to_train_that_exclude_each_other_are_told_by_what_asks_for_them(monkeypatch):
    with pytest.raises(SettingConflict, match=r"fsdp_plugin=...\) and Accelerator\(deepspeed_plugin=...\) ask for two"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(), fsdp_plugin=FullyShardedDataParallelPlugin())
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(SettingConflict, match=r"ACCELERATE_USE_MEGATRON_LM=true and Accelerator\(deepspeed"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin())


@pytest.mark.distributed
def test_the_engine_of_another_package_trains_as_its_page_says(run_ranks, install_page):
    site = install_page("add-an-engine")

    def train():
        sys.path.insert(0, str(site))
        found = runpy.run_path(str(site / "train.py"))
        accelerator, model = found["accelerator"], found["model"]
        return accelerator._engine.name, accelerator.distributed_type, found["optimizer"].steps, model.weight.tolist()

    first, second = run_ranks(2, train)
    assert first == second
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    samples = torch.randn(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in samples.split(8):
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(), optimizer.zero_grad()
    assert first[:3] == ("toy", "MULTI_CPU", 4)
    torch.testing.assert_close(torch.tensor(first[3]), model.weight.data)
