"""Documented settings of sharded data parallelism: names, numbers, spellings, and what is refused."""

import re

import pytest

from orc.runtime.core.config import ConfigError, check, to_env
from orc.runtime.core.fsdp_settings import (
    PREFETCHES,
    STATE_DICT_TYPES,
    STRATEGIES,
    WRAP_POLICIES,
    ZERO_STAGES,
    from_environment,
    normalise,
    prefetch,
    state_dict_type,
    strategy,
    variables,
    wrap_policy,
)

# The configuration file that the documentation shows.
DOCUMENTED = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
    "fsdp_use_orig_params": True,
}


def test_every_key_of_the_documented_file_becomes_its_variable_and_is_read_back():
    env = to_env({"fsdp": DOCUMENTED})
    assert env == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
        "FSDP_USE_ORIG_PARAMS": "true",
    }
    assert from_environment(env) == {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "backward_prefetch": "BACKWARD_PRE",
        "forward_prefetch": False,
        "cpu_ram_efficient_loading": True,
        "cpu_offload": False,
        "sharding_strategy": "FULL_SHARD",
        "state_dict_type": "SHARDED_STATE_DICT",
        "sync_module_states": True,
        "transformer_cls_names_to_wrap": ["BertLayer"],
        "use_orig_params": True,
    }


@pytest.mark.parametrize(
    ("parse", "names"),
    [(strategy, STRATEGIES), (wrap_policy, WRAP_POLICIES), (prefetch, PREFETCHES), (state_dict_type, STATE_DICT_TYPES)],
)
def test_choices_have_numbers_from_one_and_names_in_any_case(parse, names):
    for number, name in enumerate(names, 1):
        assert parse(number) == parse(str(number)) == parse(name) == parse(name.lower()) == name
    with pytest.raises(ValueError, match=f"expected one of 1 {names[0]}.*did you mean '{names[0]}'"):
        parse(names[0] + "X")
    with pytest.raises(ValueError, match="expected one of"):
        parse(len(names) + 1)


def test_strategies_map_to_the_documented_stages_of_zero():
    assert list(ZERO_STAGES.items()) == [
        ("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), ("HYBRID_SHARD", 3), ("HYBRID_SHARD_ZERO2", None)
    ]  # fmt: skip


def test_keys_are_taken_with_and_without_prefix_and_read_again_unchanged():
    short = {"version": "2", "reshard_after_forward": "no", "min_num_params": "1e3", "backward_prefetch": None}
    assert normalise(short) == {"version": 2, "reshard_after_forward": False, "min_num_params": 1000}
    assert check("fsdp", check("fsdp", DOCUMENTED)) == check("fsdp", DOCUMENTED)
    assert variables({"transformer_cls_to_wrap": ["A", "B"]})["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "A,B"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fsdp_sharding_stratgy": 1}, "fsdp: unknown key 'fsdp_sharding_stratgy', did you mean 'sharding_strategy'?"),
        ({"sharding_strategy": "FULL"}, "sharding_strategy: 'FULL': expected one of 1 FULL_SHARD"),
        ({"fsdp_offload_params": "perhaps"}, "fsdp_offload_params: 'perhaps': not a truth value"),
        ({"version": 3}, "version: 3: expected 1 or 2"),
        ({"min_num_params": -1}, "min_num_params: -1: expected a whole number of at least 0"),
        ({"transformer_layer_cls_to_wrap": "A,,B"}, "expected names of classes"),
        ({"backward_prefetch": 1, "fsdp_backward_prefetch_policy": 1}, "backward_prefetch_policy is given twice"),
        ({"version": 1, "reshard_after_forward": True}, "belongs to version 2"),
        ({"version": 2, "reshard_after_forward": "FULL_SHARD"}, "belongs to version 1"),
        ({"version": 2, "sharding_strategy": 1, "reshard_after_forward": False}, "contradicts"),
        ({"version": 2, "sharding_strategy": "NO_SHARD"}, "version 2 always shards"),
        ({"version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "belongs to version 1"),
        (["version", 2], "expected a mapping"),
    ],
)
def test_what_cannot_be_is_one_error_with_the_key(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check("fsdp", values)


def test_a_bad_variable_is_named():
    with pytest.raises(ValueError, match=r"FSDP_AUTO_WRAP_POLICY='SIZE': expected one of"):
        from_environment({"FSDP_AUTO_WRAP_POLICY": "SIZE"})
