"""The stand-in for accelerate: names, metadata, what is absent, and how processes get it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ORC = Path(sys.executable).with_name("orc")


def run(code: str, *, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ORC_", "ACCELERATE_"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, check=check, timeout=150)


def test_every_name_is_the_runtimes_or_says_what_to_use_when_it_is_used() -> None:
    code = """
import importlib, importlib.metadata, importlib.util, json, runpy, sys
import orc.runtime
orc.runtime.stand_in("accelerate")
orc.runtime.stand_in("accelerate")  # again: nothing
cheap = importlib.util.find_spec("accelerate") is not None and "torch" not in sys.modules
import accelerate, accelerate.big_modeling
from accelerate.state import AcceleratorState
from accelerate.utils import FSDP_SHARDING_STRATEGY, is_peft_model, set_seed
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from orc.runtime.stand_ins import names

assert not {*names.ABSENT} & {*orc.runtime.HOMES, *names.HERE}, "both there and absent"
for module in names.MODULES:
    for name in dir(importlib.import_module(module)):
        getattr(sys.modules[module], name)

import accelerate.utils.tqdm as module_of_tqdm
from accelerate.utils import tqdm  # the function, whoever has imported the module of this name
assert list(tqdm(range(2), disable=True)) == [0, 1] and accelerate.utils.tqdm is tqdm

star = {}
exec("from accelerate.utils import *", star)

def error(use):
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

import torch
linear = torch.nn.Linear(2, 2)
class Doubling(ModelHook):
    def post_forward(self, module, output):
        return output * 2
plain = linear(torch.ones(2))
doubled = add_hook_to_module(linear, Doubling())(torch.ones(2))
both = add_hook_to_module(linear, Doubling(), append=True)(torch.ones(2))
again = remove_hook_from_module(linear, recurse=True)(torch.ones(2))
distributions = importlib.metadata.packages_distributions()["accelerate"]
print(json.dumps({
    "cheap": cheap,
    "same": accelerate.Accelerator is orc.runtime.Accelerator and AcceleratorState is orc.runtime.AcceleratorState,
    "version": [accelerate.__version__, importlib.metadata.version("accelerate"), set(distributions) == {"accelerate"}],
    "home": "huggingface" in importlib.metadata.metadata("accelerate")["Home-page"],  # by which some know it
    "strategies": FSDP_SHARDING_STRATEGY[:2],
    "peft": is_peft_model(linear),
    "instance": isinstance(linear, accelerate.utils.MegatronEngine) or issubclass(ModelHook, AlignDevicesHook),
    "star": {"ProjectConfiguration", "gather"} <= star.keys() and "filter_first_and_last_linear_layers" not in star,
    "hooks": [bool((doubled == 2 * plain).all()), bool((both == 4 * plain).all()), bool((again == plain).all())],
    "missing": importlib.util.find_spec("accelerate.nothing") is None and not hasattr(accelerate, "nothing"),
    "errors": [
        error(accelerate.utils.MegatronEngine),
        error(lambda: accelerate.utils.filter_first_and_last_linear_layers.backend),
        error(lambda: exec("from accelerate import Acelerator")),
        error(lambda: accelerate.utils.set_sed),
        error(lambda: orc.runtime.stand_in("acelerate")),
        error(lambda: runpy.run_module("accelerate.commands.launch")),
    ],
}))
"""
    found: dict[str, Any] = json.loads(run(code).stdout)
    errors = found.pop("errors")
    assert found == {
        "cheap": True,
        "same": True,
        "version": ["1.12.0", "1.12.0", True],
        "home": True,
        "strategies": ["FULL_SHARD", "SHARD_GRAD_OP"],
        "peft": False,
        "instance": False,
        "star": True,
        "hooks": [True, True, True],
        "missing": True,
    }
    assert errors[0].startswith("ImportError: accelerate.MegatronEngine() is not in orc.runtime")
    assert "megatron_lm_plugin=" in errors[0]
    assert errors[1].startswith("AttributeError: accelerate.filter_first_and_last_linear_layers.backend")
    assert errors[2].startswith("ImportError")
    assert "did you mean 'Accelerator'?" in errors[2]
    assert errors[3].startswith("AttributeError")
    assert "did you mean 'set_seed'?" in errors[3]
    assert errors[4].startswith("ConfigError")
    assert "did you mean 'accelerate'?" in errors[4]
    assert "accelerate.commands.launch is no program: orc.runtime stands in" in errors[5]


WHERE = """
import importlib.metadata, importlib.util, json, multiprocessing, os, subprocess, sys
def version():
    return importlib.metadata.version("accelerate")
def main():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        worker = pool.apply(version)
    child = [sys.executable, "-c", "import importlib.metadata as m; print(m.version('accelerate'))"]
    child = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
    text = json.dumps([os.environ["RANK"], version(), worker, child, "torch" in sys.modules])
    os.write(1, (text + "\\n").encode())
if __name__ == "__main__":
    main()
"""


def test_ranks_workers_and_children_have_it_and_only_with_the_option(tmp_path: Path) -> None:
    """The real package, which the tests' environment has, answers without the option."""
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    real = run("import importlib.metadata as m; print(m.version('accelerate'))").stdout.strip()
    assert real != "1.12.0"

    def versions(*options: str) -> list[Any]:
        command = [str(ORC), "launch", "-n", "2", *options, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, cwd=tmp_path)
        return sorted(json.loads(line) for line in done.stdout.splitlines())

    expected = "1.12.0"
    assert versions("--stand_in", "accelerate") == [[rank, expected, expected, expected, False] for rank in "01"]
    assert versions() == [[rank, real, real, real, False] for rank in "01"]


def test_what_cannot_be_stood_in_for_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ORC), "launch", "--stand-in", "acelerate", "x.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "did you mean 'accelerate'?" in done.stderr
    hook = tmp_path / "sitecustomize.py"
    hook.symlink_to(ROOT / "launchers" / "rank_hooks" / "startup.py")
    rank = run("print('went on')", check=False, PYTHONPATH=str(tmp_path), ORC_STAND_IN="../evil")
    assert (rank.returncode, rank.stdout) == (2, "")
    assert "there is no stand-in for '../evil'" in rank.stderr
    late = run(
        "import sys, types; sys.modules['accelerate'] = types.ModuleType('accelerate')\n"
        "import orc.runtime; orc.runtime.stand_in('accelerate')",
        check=False,
    )
    assert "ImportError: accelerate is already imported" in late.stderr


@pytest.mark.parametrize(("value", "variable"), [("[accelerate]", "accelerate"), ("accelerate", "accelerate")])
def test_a_job_file_asks_for_it(value: str, variable: str, tmp_path: Path) -> None:
    from orc.launchers.spec.load import load_job
    from orc.runtime.core.config import to_env

    path = tmp_path / "job.yaml"
    path.write_text(f"name: x\nscript: train.py\nruntime: {{stand_in: {value}}}\n")
    (tmp_path / "train.py").touch()
    assert to_env(load_job(path).spec.runtime) == {"ORC_STAND_IN": variable}


def test_the_example_of_the_page_on_compatibility_runs() -> None:
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    assert "MegatronEngine() is not in orc.runtime" in run(code).stdout
