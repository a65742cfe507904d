"""Options of fp8: documented values, the environment, the choice of a back end, and what contradicts itself."""

import re

import pytest

from orc.runtime import (
    Accelerator,
    AORecipeKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    LaunchError,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from orc.runtime.core import fp8_settings
from orc.runtime.core.config import PRECISIONS, ConfigError, to_env
from orc.runtime.core.fp8_recipes import resolve_recipe
from orc.runtime.parallel.precision import precision_for

DEPRECATED = pytest.mark.filterwarnings("ignore:FP8RecipeKwargs is deprecated")


def test_every_precision_of_the_table_is_a_module_of_its_name():
    assert {name: precision_for(name).name for name in PRECISIONS} == {name: name for name in PRECISIONS}


def test_what_a_recipe_leaves_out_comes_from_the_environment_then_from_the_defaults(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    monkeypatch.setenv("ACCELERATE_FP8_FORMAT", "e4m3")
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION", "true,false,false")
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "1")
    recipe = TERecipeKwargs(margin=0, amax_compute_algo="max")
    assert recipe.to_dict() == {
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "E4M3",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "override_linear_precision": (True, False, False),
        "use_mxfp8_block_scaling": False,
    }
    assert MSAMPRecipeKwargs().opt_level == "O1"
    assert (AORecipeKwargs().pad_inner_dim, AORecipeKwargs().enable_fsdp_float8_all_gather) == (True, False)
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "much")
    with pytest.raises(ValueError, match="ACCELERATE_FP8_MARGIN='much': expected a whole number"):
        TERecipeKwargs()


def test_the_older_options_hold_those_of_every_back_end(monkeypatch):
    with pytest.warns(FutureWarning, match="use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs"):
        older = FP8RecipeKwargs(backend="te", margin=2, fp8_format="HYBRID")
    assert older.of("TE") == TERecipeKwargs(margin=2)
    assert older.to_kwargs() == {"backend": "TE", "margin": 2}
    with pytest.warns(FutureWarning):
        older = FP8RecipeKwargs(backend="msamp", optimization_level="O1")
    assert (older.opt_level, older.of("MSAMP")) == ("O1", MSAMPRecipeKwargs(opt_level="O1"))


@DEPRECATED
@pytest.mark.parametrize(
    ("there", "wanted", "chosen"),
    [
        (["MSAMP", "TE", "AO"], None, "MSAMP"),
        (["TE", "AO"], None, "TE"),
        (["AO"], None, "AO"),
        (["MSAMP", "TE"], "te", "TE"),
        (["MSAMP", "AO"], "AO", "AO"),
    ],
)
def test_ms_amp_is_chosen_where_it_is_installed_unless_another_is_asked_for(there, wanted, chosen, monkeypatch):
    monkeypatch.setattr(fp8_settings, "installed", lambda: there)
    assert resolve_recipe(FP8RecipeKwargs(backend=wanted)).backend == chosen
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", wanted or "")
    assert resolve_recipe(None).backend == chosen


@DEPRECATED
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MSAMPRecipeKwargs(opt_level="O3"), "O3 needs DeepSpeed 0.9.2 or older and is not offered; choose O1"),
        (lambda: FP8RecipeKwargs(optimization_level="O3"), "O3 needs DeepSpeed 0.9.2 or older"),
        (lambda: FP8RecipeKwargs(opt_level="O1", optimization_level="O2"), "are the same and differ"),
        (lambda: FP8RecipeKwargs(backend="te", opt_level="O1"), "opt_level belongs to the back end msamp, and te is"),
        (lambda: FP8RecipeKwargs(backend="tee"), "expected one of te, msamp, ao, did you mean 'te'?"),
        (lambda: TERecipeKwargs(override_linear_precision=(True, False)), "for fprop, dgrad and wgrad"),
        (lambda: TERecipeKwargs(amax_history_len=0), "expected a whole number of at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused_with_the_reason(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kwargs_handlers": [TERecipeKwargs()]},
            "back end te needs the package transformer_engine[pytorch]",
        ),
        ({"kwargs_handlers": [MSAMPRecipeKwargs()]}, "needs the package ms-amp, which is not installed; installed: ao"),
        (
            {"kwargs_handlers": [AORecipeKwargs(), TERecipeKwargs()]},
            "TERecipeKwargs and AORecipeKwargs choose",
        ),
        (
            {"mixed_precision": "bf16", "kwargs_handlers": [AORecipeKwargs()]},
            "AORecipeKwargs needs mixed_pre",
        ),
    ],
)
def test_an_accelerator_refuses_a_precision_that_cannot_be_before_anything_is_allocated(options, message):
    with pytest.raises((ValueError, LaunchError), match=re.escape(message)):
        Accelerator(**{"mixed_precision": "fp8", **options})
    assert Accelerator(mixed_precision="no").fp8_backend is None  # and nothing of it stays


@pytest.mark.parametrize("module", ["transformer_engine", "msamp"])
def test_a_back_end_for_gpus_is_refused_on_a_cpu(module, monkeypatch):
    name = {"transformer_engine": "TE", "msamp": "MSAMP"}[module]
    monkeypatch.setattr(fp8_settings, "installed", lambda: [name])
    with pytest.raises(LaunchError, match=f"back end {name.lower()}: it computes on NVIDIA GPUs, not on cpu"):
        Accelerator(mixed_precision="fp8", cpu=True)


def test_without_any_library_the_packages_are_named(monkeypatch):
    monkeypatch.setattr(fp8_settings, "installed", list)
    with pytest.raises(LaunchError, match=r"needs one of the packages ms-amp, .* none is installed"):
        Accelerator(mixed_precision="fp8")


def test_an_old_gpu_is_refused_by_its_name(monkeypatch):
    import torch

    from orc.runtime.parallel.precision.fp8.te import TE

    class Context:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert "compute capability 8.9); NVIDIA A100 has 8.0; choose bf16" in TE(TERecipeKwargs()).requires(Context())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert TE(TERecipeKwargs()).requires(Context()) is None


def test_deepspeed_trains_with_torchao_only(monkeypatch):
    from orc.runtime import DeepSpeedPlugin

    monkeypatch.setattr(fp8_settings, "installed", lambda: ["TE"])
    with pytest.raises(LaunchError, match="the back end te of fp8 and DeepSpeed do not go together in this version"):
        Accelerator(mixed_precision="fp8", deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), cpu=True)


def test_shards_keep_what_fp8_does_not_compute_in_bfloat16():
    import torch

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    Accelerator(mixed_precision="fp8", fsdp_plugin=plugin, cpu=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16


def test_settings_of_a_job_become_the_documented_variables():
    settings = {
        "backend": "TE",
        "amax_history_length": 16,
        "override_linear_precision": False,
        "use_autocast_during_eval": 1,
    }
    assert to_env({"mixed_precision": "fp8", "fp8": settings}) == {
        "ORC_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": "TE",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
        "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION": "false,false,false",
        "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "true",
    }
    with pytest.raises(ConfigError, match="fp8 has no effect with mixed_precision: bf16"):
        to_env({"mixed_precision": "bf16", "fp8": settings})
    with pytest.raises(ConfigError, match="unknown key 'amax_histroy_len', did you mean 'amax_history_len'"):
        to_env({"mixed_precision": "fp8", "fp8": {"amax_histroy_len": 1}})
