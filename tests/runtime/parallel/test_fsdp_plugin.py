"""`FullyShardedDataParallelPlugin`: both forms of every value, where values come from, and what contradicts."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin as Plugin
from orc.runtime.parallel.wrap_policy import units


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)


class Model(nn.Module):
    _no_split_modules = ("Block", "Absent")

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    import os

    for name in os.environ:
        if "FSDP" in name:
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("forms", "field", "value"),
    [
        ((4, "4", "hybrid_shard", "HYBRID_SHARD", ShardingStrategy.HYBRID_SHARD), "sharding_strategy",
         ShardingStrategy.HYBRID_SHARD),
        ((5, "HYBRID_SHARD_ZERO2", ShardingStrategy._HYBRID_SHARD_ZERO2), "sharding_strategy",
         ShardingStrategy._HYBRID_SHARD_ZERO2),
        ((1, "backward_pre", BackwardPrefetch.BACKWARD_PRE), "backward_prefetch", BackwardPrefetch.BACKWARD_PRE),
        ((3, "NO_PREFETCH", None), "backward_prefetch", None),
        ((3, "sharded_state_dict", StateDictType.SHARDED_STATE_DICT), "state_dict_type",
         StateDictType.SHARDED_STATE_DICT),
        ((True, "true", "1"), "use_orig_params", True),
        ((True, "yes", CPUOffload(offload_params=True)), "cpu_offload", CPUOffload(offload_params=True)),
        ((3, "no_wrap", None), "auto_wrap_policy", None),
        ((None, 1, "1"), "fsdp_version", 1),
        (("A,B", ["A", "B"]), "transformer_cls_names_to_wrap", ["A", "B"]),
        ((1000, "1000", "1e3"), "min_num_params", 1000),
    ],
)  # fmt: skip
def test_values_are_taken_by_number_by_name_and_as_torchs_member(forms, field, value):
    for form in forms:
        assert getattr(Plugin(**{field: form}), field) == value, form


def test_the_defaults_of_both_versions():
    one, two = Plugin(), Plugin(fsdp_version=2)
    assert (one.sharding_strategy, one.reshard_after_forward) == (ShardingStrategy.FULL_SHARD,) * 2
    assert (two.sharding_strategy, two.reshard_after_forward) == (None, True)
    assert isinstance(one.state_dict_config, FullStateDictConfig)
    assert (one.state_dict_config.offload_to_cpu, one.state_dict_config.rank0_only) == (True, True)
    assert isinstance(two.state_dict_config, ShardedStateDictConfig)
    assert (one.cpu_offload, type(two.cpu_offload)) == (CPUOffload(offload_params=False), OffloadPolicy)
    assert (one.sync_module_states, two.sync_module_states, one.use_orig_params) == (False, True, False)
    assert isinstance(Plugin(fsdp_version=2, cpu_offload=True).cpu_offload, CPUOffloadPolicy)
    assert Plugin(fsdp_version=2, reshard_after_forward=4).reshard_after_forward == 4
    assert Plugin(fsdp_version=2, sharding_strategy="SHARD_GRAD_OP").reshard_after_forward is False


def test_an_argument_beats_the_environment_and_that_the_default(monkeypatch):
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "2")
    monkeypatch.setenv("FSDP_USE_ORIG_PARAMS", "true")
    monkeypatch.setenv("FSDP_BACKWARD_PREFETCH", "BACKWARD_POST")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "A,B")
    plugin = Plugin(use_orig_params=False)
    assert plugin.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert (plugin.use_orig_params, plugin.backward_prefetch) == (False, BackwardPrefetch.BACKWARD_POST)
    assert plugin.transformer_cls_names_to_wrap == ["A", "B"]
    assert Plugin(sharding_strategy=1).sharding_strategy is ShardingStrategy.FULL_SHARD
    assert Plugin(fsdp_version=2, reshard_after_forward=True).reshard_after_forward is True
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert Plugin().reshard_after_forward is False
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
    with pytest.raises(ValueError, match="sharding_strategy=SHARD_GRAD_OP contradicts reshard_after_forward=True"):
        Plugin()
    monkeypatch.delenv("FSDP_SHARDING_STRATEGY")
    with pytest.raises(ValueError, match="reshard_after_forward=True belongs to version 2"):
        Plugin(fsdp_version=1)


def test_ram_efficient_loading_turns_on_what_it_needs():
    assert Plugin(cpu_ram_efficient_loading=True).sync_module_states is True
    with pytest.warns(UserWarning, match="needs sync_module_states"):
        assert Plugin(cpu_ram_efficient_loading="true", sync_module_states="false").sync_module_states is True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sharding_strategy": "FULL"}, "sharding_strategy='FULL': expected one of 1 FULL_SHARD"),
        ({"fsdp_version": 3}, "expected 1 or 2"),
        ({"cpu_offload": "maybe"}, "not a truth value"),
        ({"fsdp_version": 2, "sharding_strategy": "NO_SHARD"}, "version 2 always shards"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "belongs to version 1"),
        ({"mixed_precision_policy": "fp4"}, "mixed precision 'fp4' is not one of"),
        ({"mixed_precision_policy": {"param_type": "bf16"}}, "mixed_precision_policy: .*param_type"),
        ({"fsdp_version": 2, "mixed_precision_policy": MixedPrecision()}, "takes torch's MixedPrecisionPolicy"),
    ],
)
def test_what_cannot_be_is_one_error(fields, message):
    with pytest.raises(ValueError, match=message):
        Plugin(**fields)


def test_setters_choose_type_precision_and_their_options():
    one, two = Plugin(), Plugin(fsdp_version=2)
    one.set_state_dict_type("SHARDED_STATE_DICT")
    assert isinstance(one.state_dict_config, ShardedStateDictConfig)
    given = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    assert Plugin(state_dict_config=given).state_dict_config is given
    one.set_mixed_precision("bf16")
    bf16 = torch.bfloat16
    expected = MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=torch.float32)
    assert one.mixed_precision_policy == expected
    one.set_mixed_precision("fp16")
    assert one.mixed_precision_policy == expected  # there is one
    one.set_mixed_precision("fp16", buffer_autocast=True, override=True)
    assert one.mixed_precision_policy.buffer_dtype == torch.float16
    two.set_mixed_precision("bf16")
    assert two.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
    mapping = Plugin(fsdp_version=2, mixed_precision_policy={"param_dtype": "bf16", "output_dtype": torch.float32})
    assert mapping.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=bf16, output_dtype=torch.float32)


def test_policies_choose_the_units():
    model = Model()
    names = {module: name for name, module in model.named_modules()}

    def chosen(**fields):
        plugin = Plugin(**fields)
        plugin.set_auto_wrap_policy(model)
        return [names[unit] for unit in units(model, plugin.auto_wrap_policy)]

    blocks = ["blocks.0", "blocks.1", ""]
    assert chosen(auto_wrap_policy=1, transformer_cls_names_to_wrap="Block") == blocks
    assert chosen(auto_wrap_policy="transformer_based_wrap") == blocks  # _no_split_modules
    assert chosen(auto_wrap_policy="size_based_wrap", min_num_params=40) == blocks
    assert chosen(auto_wrap_policy="size_based_wrap") == chosen() == [""]
    # The embedding is shared with the head: no unit of its own.
    by_one = ["blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b", ""]
    assert chosen(auto_wrap_policy="size_based_wrap", min_num_params=20) == by_one
    assert chosen(auto_wrap_policy=ModuleWrapPolicy({Block})) == ["blocks.1", "blocks.0", ""]
    lambda_policy = functools.partial(lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block))
    assert chosen(auto_wrap_policy=lambda_policy) == blocks
    with pytest.raises(ValueError, match="no module of class 'block' to wrap, did you mean 'Block'"):
        chosen(auto_wrap_policy=1, transformer_cls_names_to_wrap=["Block", "block"])
    with pytest.raises(ValueError, match="Embedding cannot be a unit of its own: its parameter weight is shared"):
        chosen(auto_wrap_policy=1, transformer_cls_names_to_wrap="Embedding")
    with pytest.raises(ValueError, match=r"name the classes to wrap.*the model has Block, Linear"):
        Plugin(auto_wrap_policy=1).set_auto_wrap_policy(nn.Sequential(Block()))
