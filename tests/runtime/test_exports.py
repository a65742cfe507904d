"""The package's names: lazy, complete, and cheap to import."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import orc.runtime


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_no_torch():
    code = "import sys, orc.runtime, orc.runtime.core.config; print('torch' in sys.modules, len(dir(orc.runtime)) > 30)"
    assert python(code) == "False True"


def test_importing_the_package_is_cheap_and_an_accelerator_reads_few_modules():
    code = (
        "import torch, time, sys\n"
        "start = time.process_time(); import orc.runtime; spent = time.process_time() - start\n"
        "orc.runtime.Accelerator(cpu=True)\n"
        "print(spent, *(name for name in sys.modules if name.startswith('orc.')))"
    )
    spent, *modules = python(code).split()
    assert min(float(spent), float(python(code).split()[0])) < 0.005
    late = ("p_settings", "p8_settings", "_keys", "recipes", "_handlers", "_options", "tree", "quantization")
    assert not [name for name in modules if name.endswith(late)], "what one Accelerator needs is imported when it does"
    assert len(modules) <= 68, "each is found, read and run in every process"


def test_the_utilities_need_no_import_of_their_own(run_ranks):
    def found():
        before = "orc.runtime.utils" in sys.modules
        utils = getattr(orc.runtime, "utils")  # noqa: B009 - what is sent to a rank imports the modules it writes out
        return before, utils.set_seed is orc.runtime.set_seed, utils.__name__

    assert run_ranks(1, found) == [(False, True, "orc.runtime.utils")]


def test_a_scaler_and_an_autocast_context_are_made_by_one_function_each():
    root = Path(orc.runtime.__file__).parent
    for name in ("get_grad_scaler", "get_mixed_precision_context_manager"):
        homes = [path.name for path in root.rglob("*.py") if f"def {name}(" in path.read_text()]
        assert homes == ["amp.py"], name


def test_star_import_brings_every_name():
    found = {}
    exec("from orc.runtime import *", found)
    assert {*orc.runtime.__all__} <= {*found}


def test_every_name_exists_where_it_is_said_to_be():
    for name in orc.runtime.__all__:
        value = getattr(orc.runtime, name)
        assert name in dir(orc.runtime)
        assert value is getattr(importlib.import_module(f"orc.runtime.{orc.runtime.HOMES[name]}"), name)


def test_type_checkers_see_the_same_names():
    root = Path(orc.runtime.__file__).parent
    done = subprocess.run([sys.executable, root.parent / ".ci/exports.py"], capture_output=True, text=True, check=True)
    assert (root / "__init__.pyi").read_text() == done.stdout, "the table has changed: run `make exports`"


def test_the_table_is_in_order():
    names = list(orc.runtime.HOMES)
    assert names == sorted(names, key=lambda name: (name.lower(), name))


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(orc.runtime, "Acelerator")


def test_enumerations_are_words():
    from orc.runtime import (
        ComputeEnvironment,
        DDPCommunicationHookType,
        DistributedType,
        DynamoBackend,
        LoggerType,
        PrecisionType,
        RNGType,
        SageMakerDistributedType,
    )

    assert DistributedType.TPU is DistributedType.XLA
    assert str(DistributedType("MULTI_CPU")) == "MULTI_CPU"
    assert [*PrecisionType] == ["no", "fp16", "bf16", "fp8"]
    assert {"torch", "cuda", "xla", "generator"} <= {*RNGType}
    assert {"all", "tensorboard", "wandb", "comet_ml", "mlflow"} <= {*LoggerType}
    assert [*ComputeEnvironment] == ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"]
    assert [*SageMakerDistributedType] == ["NO", "DATA_PARALLEL", "MODEL_PARALLEL"]
    assert DynamoBackend.NO == "NO"
    assert {"EAGER", "AOT_EAGER", "INDUCTOR", "CUDAGRAPHS", "ONNXRT", "TENSORRT", "TVM", "IPEX"} <= {*DynamoBackend}
    assert {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA",
            "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"} == {*DistributedType}  # fmt: skip
    assert {"npu", "xpu", "mlu", "hpu"} <= {*RNGType}
    assert "batched_power_sgd" in {*DDPCommunicationHookType}
    assert {"no", "fp16", "bf16", "power_sgd"} <= {*DDPCommunicationHookType}


def test_the_feature_table_points_at_files_that_exist():
    import re

    root = Path(orc.runtime.__file__).parents[1]
    text = (root / "docs/reference/inventory.md").read_text()
    rows = [
        re.split(r" *(?<!\\)\| *", line)[1:-1] for line in re.findall(r"^\| [A-Z0-9]+-\d+ \|.*\|$", text, re.MULTILINE)
    ]
    assert len({row[0] for row in rows}) == len(rows) > 700
    for row in rows:
        _, _, state, lives, tested, note = row
        assert state in "YPN", row
        assert state == "Y" or note, f"what is missing? {row}"
        assert state == "N" or lives != "–", row
        for folder, cell in ((root, lives), (root / "tests", tested)):
            assert all((folder / one.strip("`")).exists() for one in cell.split(", ") if one not in ("–", "advice")), (
                row
            )


def test_every_plugin_and_hook_stands_in_the_reference_with_its_arguments():
    page = (Path(__file__).parents[2] / "docs/reference/plugins-and-hooks.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", page, re.MULTILINE))
    named = [name for name in orc.runtime.__all__ if name.endswith(("Plugin", "Hook", "Config", "CpuOffload"))]
    assert len(named) > 15
    for name in named:
        parameters = inspect.signature(getattr(orc.runtime, name)).parameters.values()
        wanted = {f"`{one.name}`" for one in parameters if one.kind is not one.VAR_POSITIONAL}
        assert wanted <= set(re.findall(r"`\w+`", rows[name])), name
