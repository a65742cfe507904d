"""The DeepSpeed plug-in: arguments, environment and configuration file; DeepSpeed itself is not needed."""

import base64
import json

import pytest

from orc.runtime.core.deepspeed_keys import FIELDS, variables
from orc.runtime.engine.deepspeed.config import HfDeepSpeedConfig
from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin

EXPLICIT = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    },
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 10,
    "steps_per_print": 2000000,
}
AUTO = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto"},
        "offload_param": {"device": "auto"},
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 2000000,
}
INF = float("inf")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """``launched(settings)`` puts a launcher's variables for *settings* into an environment without any."""
    import os

    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "ORC_")):
            monkeypatch.delenv(name)

    def launch(**settings):
        for name, value in variables(settings).items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.fixture
def file(tmp_path):
    def write(config):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


def test_a_launcher_that_names_a_file_and_the_same_settings_is_refused_by_their_names(launched, file):
    settings = {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    }
    launched(**settings, deepspeed_config_file=file(EXPLICIT))
    with pytest.raises(ValueError, match="will be ignored") as refusal:
        DeepSpeedPlugin()
    listed = str(refusal.value).partition("[")[2].partition("]")[0].replace("'", "").replace(" ", "").split(",")
    assert set(listed) == set(settings) - {"zero3_init_flag"} | {"mixed_precision"}
    assert "accelerate config" in str(refusal.value)


def test_a_file_alone_is_taken_as_it_is_with_the_other_precision_switched_off(launched, file):
    launched(deepspeed_config_file=file(EXPLICIT), zero3_init_flag=True)
    plugin = DeepSpeedPlugin()
    assert plugin.set_mixed_precision("no") == "bf16"
    assert plugin.deepspeed_config == {**EXPLICIT, "steps_per_print": INF, "fp16": {"enabled": False}}
    assert plugin.zero3_init_flag
    assert plugin.gradient_accumulation_steps == 10


def test_what_the_file_leaves_to_auto_comes_from_the_launcher(launched, file):
    launched(
        deepspeed_config_file=file(AUTO),
        zero_stage=3,
        gradient_accumulation_steps=5,
        gradient_clipping=1.0,
        offload_param_device="cpu",
        offload_optimizer_device="nvme",
        zero3_save_16bit_model="true",
    )
    plugin = DeepSpeedPlugin()
    assert plugin.set_mixed_precision("fp16") == "fp16"
    assert plugin.deepspeed_config == {
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "nvme"},
            "offload_param": {"device": "cpu"},
        },
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 5,
        "steps_per_print": INF,
        "fp16": {"enabled": True, "auto_cast": True},
    }
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.zero3_save_16bit_model) == (3, "nvme", True)


def test_an_argument_comes_before_the_environment_and_that_before_the_default(launched):
    assert (DeepSpeedPlugin().zero_stage, DeepSpeedPlugin().gradient_accumulation_steps) == (2, "auto")
    launched(zero_stage=3, gradient_clipping=0.5, deepspeed_moe_layer_cls_names="Moe")
    plugin = DeepSpeedPlugin(zero_stage=1, zero3_init_flag=True)
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.transformer_moe_cls_names) == (1, 0.5, "Moe")
    assert not plugin.zero3_init_flag, "it is for stage 3"
    assert DeepSpeedPlugin().zero3_init_flag


def test_variables_that_a_launcher_always_sets_do_not_count_unless_it_lists_them(launched, monkeypatch, file):
    launched(deepspeed_config_file=file(EXPLICIT))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "none")
    assert DeepSpeedPlugin().zero_stage == 3
    monkeypatch.delenv(FIELDS)
    with pytest.raises(ValueError, match="zero_stage"):
        DeepSpeedPlugin()


def test_a_configuration_is_read_from_a_file_a_dictionary_an_object_and_base64(file):
    encoded = base64.urlsafe_b64encode(json.dumps(AUTO).encode()).decode()
    for source in (file(AUTO), AUTO, encoded, HfDeepSpeedConfig(AUTO)):
        plugin = DeepSpeedPlugin(source, zero_stage=3)
        assert plugin.hf_ds_config.is_zero3()
        assert plugin.is_auto("train_batch_size")
        assert plugin.get_value("zero_optimization.offload_param.device") == "none"
        assert plugin.get_value("zero_optimization.nothing.there", 7) == 7
    assert AUTO["zero_optimization"]["stage"] == "auto", "the script's own dictionary stays as it is"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hf_ds_config": "/nowhere/ds.json"}, "/nowhere/ds.json"),
        ({"hf_ds_config": 7}, "path of a JSON file"),
        ({"hf_ds_config": {"zero_optimisation": {"stage": 2}}}, "did you mean 'zero_optimization'"),
        ({"hf_ds_config": {"zero_optimization": 2}}, "not a section"),
        ({"hf_ds_config": {"fp16": {"enabled": True}, "bf16": {"enabled": True}}}, "fp16 and bf16"),
        ({"zero_stage": 4}, "zero_stage = 4"),
        ({"zero_stage": "two"}, "zero_stage = 'two'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gradient_clipping": -1}, "gradient_clipping"),
        ({"offload_optimizer_device": "disk"}, "none, cpu, nvme"),
        ({"enable_msamp": True}, "MS-AMP"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeepSpeedPlugin(**arguments)


@pytest.mark.parametrize("source", [{"zero_stage": 2, "offload_param_device": "cpu"}, "file"])
def test_offloading_that_the_stage_has_nothing_for_is_left_out_with_a_warning(source):
    section = {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    arguments = {"hf_ds_config": {"zero_optimization": section}} if source == "file" else source
    with pytest.warns(UserWarning, match="offload_param_device='cpu' has no effect: it needs zero_stage 3 or more"):
        plugin = DeepSpeedPlugin(**arguments)
    assert (plugin.zero_stage, plugin.offload_param_device) == (2, "none")
    assert plugin.get_value("zero_optimization.offload_param.device") == "none"
    assert plugin.offload_optimizer_device == ("cpu" if source == "file" else "none")


def test_of_arguments_that_say_something_else_the_file_is_taken_with_a_warning():
    less = {"zero_optimization": {"stage": 2}}
    with pytest.warns(UserWarning, match=r"DeepSpeedPlugin\(zero_stage=3\) has no effect: .*stage = 2"):
        plugin = DeepSpeedPlugin(less, zero_stage=3, gradient_clipping=1.0)
    assert (plugin.zero_stage, plugin.gradient_clipping) == (2, 1.0)


def test_an_explicit_precision_that_contradicts_the_file_is_refused():
    plugin = DeepSpeedPlugin(EXPLICIT)
    with pytest.raises(ValueError, match="contradicts"):
        plugin.set_mixed_precision("fp16", explicit=True)
    assert plugin.set_mixed_precision("bf16", explicit=True) == "bf16"


def test_values_are_filled_in_where_they_are_auto_and_compared_elsewhere():
    plugin = DeepSpeedPlugin({**AUTO, "gradient_clipping": 1.0}, zero_stage=2)
    plugin.fill_match("train_batch_size", train_batch_size=48)
    assert plugin.get_value("train_batch_size") == 48
    mismatches = []
    plugin.fill_match("gradient_clipping", mismatches, gradient_clipping=2.0)
    assert len(mismatches) == 1
    assert "gradient_clipping" in mismatches[0]
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
        plugin.fill_match("train_micro_batch_size_per_gpu")
    values = {"train_micro_batch_size_per_gpu": 24, "gradient_accumulation_steps": 1, "bf16.enabled": False}
    with pytest.raises(ValueError, match="set these values of the configuration to auto"):
        plugin.deepspeed_config_process(gradient_clipping=2.0, **values)
    plugin.deepspeed_config_process(must_match=False, gradient_clipping=2.0, **values)
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 24


def test_sharded_construction_gets_a_configuration_without_auto():
    plugin = DeepSpeedPlugin({**AUTO, "train_batch_size": "auto"}, zero_stage=3)
    config = plugin.config
    assert config["train_micro_batch_size_per_gpu"] == config["gradient_accumulation_steps"] == 1
    assert "auto" not in json.dumps(config)
    assert "train_batch_size" not in config


def test_several_plug_ins_have_names_and_the_first_is_in_force_until_another_is_selected():
    from orc.runtime import Accelerator, AcceleratorState
    from orc.runtime.core.errors import ContextError
    from orc.runtime.engine.deepspeed.plugins import get_active_deepspeed_plugin

    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    first = Accelerator(deepspeed_plugins=plugins, mixed_precision="bf16")
    assert get_active_deepspeed_plugin(first.state) is plugins["student"] is first.deepspeed_plugin
    second = Accelerator()
    assert second.state.deepspeed_plugins == plugins
    assert second.distributed_type == "DEEPSPEED"
    AcceleratorState().select_deepspeed_plugin("teacher")
    assert first.state.deepspeed_plugin is second.deepspeed_plugin is plugins["teacher"]
    assert (plugins["teacher"].selected, plugins["student"].selected) == (True, False)
    assert first.state.get_deepspeed_plugin("student") is plugins["student"]
    assert plugins["teacher"].get_value("bf16.enabled") is True
    assert f"ds_config: {plugins['teacher'].deepspeed_config}" in repr(first.state)
    with pytest.raises(ValueError, match="'student', 'teacher'"):
        first.state.select_deepspeed_plugin("coach")
    with pytest.raises(ContextError, match="share"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin())
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        plugins["student"].select()


def test_accumulation_of_the_plug_in_comes_before_that_of_the_accelerator(launched, file):
    from orc.runtime import Accelerator, AcceleratorState

    for config, expected in ((EXPLICIT, 10), (AUTO, 3)):
        plugin = DeepSpeedPlugin(config, **({"zero_stage": 2} if config is AUTO else {}))
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=3)
        assert accelerator.gradient_accumulation_steps == expected
        AcceleratorState._reset_state()
    launched(deepspeed_config_file=file(EXPLICIT))
    accelerator = Accelerator()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 10)
    AcceleratorState._reset_state()
    launched(zero_stage=1)


def test_deepspeed_comes_with_the_first_accelerator_and_with_one_argument():
    from orc.runtime import Accelerator
    from orc.runtime.core.errors import ContextError

    with pytest.raises(TypeError, match="dictionary"):
        Accelerator(deepspeed_plugins=[DeepSpeedPlugin()])
    with pytest.raises(ValueError, match="one of them"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(), deepspeed_plugins=DeepSpeedPlugin())
    Accelerator()
    with pytest.raises(ContextError, match="without DeepSpeed"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin())
