"""The rules for ``auto`` in a DeepSpeed configuration, and what may be prepared with which sections."""

from types import SimpleNamespace

import pytest

from orc.runtime.engine.deepspeed.placeholders import DummyOptim, DummyScheduler
from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin
from orc.runtime.engine.deepspeed.rules import Facts, check_combination, filled

BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
BUCKETS = {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}


@pytest.mark.parametrize(
    ("config", "facts", "expected"),
    [
        (BATCH, Facts(2, [24]), (24, 1, 48)),
        ({**BATCH, "gradient_accumulation_steps": "auto"}, Facts(2, [24], accumulation=4), (24, 4, 192)),
        ({**BATCH, "gradient_accumulation_steps": 3}, Facts(2, [24], accumulation=4), (24, 3, 144)),
        ({"train_micro_batch_size_per_gpu": 1}, Facts(4), (1, 1, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, Facts(4), (8, 2, 64)),
        (BATCH, Facts(1, [16, 4]), (4, 1, 4)),
    ],
)
def test_the_batch_is_micro_batch_times_accumulation_times_processes(config, facts, expected):
    plugin = DeepSpeedPlugin(config)
    filled(plugin, facts)
    assert (
        plugin.get_value("train_micro_batch_size_per_gpu"),
        plugin.get_value("gradient_accumulation_steps", 1),
        plugin.get_value("train_batch_size"),
    ) == expected


def test_the_largest_batch_counts_where_the_plug_in_says_so():
    plugin = DeepSpeedPlugin(BATCH, is_train_batch_min=False)
    filled(plugin, Facts(1, [16, 4]))
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 3}}, "has no `train_micro_batch_size_per_gpu`"),
        (BATCH, "no DataLoader"),
        ({"train_micro_batch_size_per_gpu": 3, "train_batch_size": 8}, "which is not"),
        ({"train_micro_batch_size_per_gpu": "many"}, "'many'"),
        ({"train_micro_batch_size_per_gpu": 1, "wall_clock_breakdown": "auto"}, "wall_clock_breakdown"),
        ({"train_micro_batch_size_per_gpu": 1, "scheduler": SCHEDULER}, "DummyScheduler"),
    ],
)
def test_what_cannot_be_known_is_refused_with_what_to_set(config, message):
    with pytest.raises(ValueError, match=message):
        filled(DeepSpeedPlugin(config), Facts(2))


@pytest.mark.parametrize("model", [{"hidden_size": 768}, {"hidden_sizes": [256, 768]}])
def test_buckets_follow_from_the_hidden_size(model):
    plugin = DeepSpeedPlugin({"train_micro_batch_size_per_gpu": 1, "zero_optimization": BUCKETS})
    filled(plugin, Facts(model_config=SimpleNamespace(**model)))
    zero = plugin.deepspeed_config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 589824
    assert zero["stage3_prefetch_bucket_size"] == 530841
    assert zero["stage3_param_persistence_threshold"] == 7680
    filled(plugin, Facts(model_config=SimpleNamespace(hidden_size=10)))
    assert zero["reduce_bucket_size"] == 100, "another model has other buckets"


def test_without_a_hidden_size_the_buckets_have_to_be_set_by_hand():
    plugin = DeepSpeedPlugin({"train_micro_batch_size_per_gpu": 1, "zero_optimization": BUCKETS})
    with pytest.raises(ValueError, match=r"reduce_bucket_size, .*by hand"):
        filled(plugin, Facts(model_config=SimpleNamespace()))


def test_optimizer_and_schedule_are_filled_in_from_their_placeholders():
    plugin = DeepSpeedPlugin({**BATCH, "optimizer": OPTIMIZER, "scheduler": SCHEDULER, "gradient_clipping": "auto"})
    optimizer = DummyOptim([object()], lr=5e-4, weight_decay=0.1)
    filled(plugin, Facts(2, [4], optimizer=optimizer, scheduler=DummyScheduler(optimizer, 1000, 100)))
    assert plugin.deepspeed_config["optimizer"]["params"] == {"lr": 5e-4, "weight_decay": 0.1, "torch_adam": True}
    assert plugin.deepspeed_config["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 5e-4,
        "warmup_num_steps": 100,
        "total_num_steps": 1000,
    }
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0


def test_limits_left_to_auto_are_deepspeeds_own():
    limits = {"stage": 3, "stage3_max_live_parameters": "auto", "stage3_max_reuse_distance": "auto"}
    plugin = DeepSpeedPlugin({"train_micro_batch_size_per_gpu": 1, "zero_optimization": limits})
    filled(plugin, Facts())
    assert plugin.deepspeed_config["zero_optimization"] == {"stage": 3}


REAL_OPTIMIZER, REAL_SCHEDULER = SimpleNamespace(param_groups=[{}]), SimpleNamespace()
DUMMY = DummyOptim([])
BOTH, NEITHER = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}, {}
ONLY_SCHEDULER, ONLY_OPTIMIZER = {"scheduler": SCHEDULER}, {"optimizer": OPTIMIZER}


@pytest.mark.parametrize(
    ("config", "optimizer", "scheduler"),
    [
        (BOTH, DUMMY, DummyScheduler(DUMMY)),
        (NEITHER, REAL_OPTIMIZER, REAL_SCHEDULER),
        (NEITHER, REAL_OPTIMIZER, None),
        (ONLY_SCHEDULER, REAL_OPTIMIZER, DummyScheduler(None)),
        (ONLY_OPTIMIZER, DUMMY, None),
        (ONLY_OPTIMIZER, DUMMY, DummyScheduler(DUMMY, lr_scheduler_callable=REAL_SCHEDULER)),
    ],
)
def test_placeholders_stand_for_sections_and_real_objects_for_themselves(config, optimizer, scheduler):
    check_combination(DeepSpeedPlugin(config), [optimizer], [scheduler] if scheduler else [])


@pytest.mark.parametrize(
    ("config", "optimizer", "scheduler", "message"),
    [
        (BOTH, REAL_OPTIMIZER, DummyScheduler(None), "DummyOptim in place of"),
        (BOTH, DUMMY, REAL_SCHEDULER, "DummyScheduler in place of"),
        (NEITHER, DUMMY, None, "there is none"),
        (NEITHER, REAL_OPTIMIZER, DummyScheduler(None), "there is none"),
        (ONLY_OPTIMIZER, DUMMY, REAL_SCHEDULER, "needs a schedule from there too"),
    ],
)
def test_other_combinations_are_refused(config, optimizer, scheduler, message):
    with pytest.raises(ValueError, match=message):
        check_combination(DeepSpeedPlugin(config), [optimizer], [scheduler] if scheduler else [])
