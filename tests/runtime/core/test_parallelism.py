"""`ParallelismConfig`: where sizes come from, what they make of the run, and what is refused."""

import pytest

from orc.runtime import (
    Accelerator,
    ConfigError,
    ContextError,
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from orc.runtime.core.context import current_context
from orc.runtime.parallel import refuse_unserved
from orc.runtime.testing import run_threads


def test_sizes_come_from_arguments_then_variables(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    config = ParallelismConfig(dp_replicate_size=3, dp_shard_size=1)
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.cp_size) == (3, 1, 4, 1)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (12, 3, 4)
    assert config.sizes == {"dp_replicate": 3, "tp": 4}
    assert (config.dp_replicate_enabled, config.dp_shard_enabled) == (True, False)
    assert (config.tp_enabled, config.cp_enabled, config.sp_enabled) == (True, False, False)


def test_dimensions_are_named_by_what_they_are_for():
    config = ParallelismConfig(pp_size=2, dp_replicate_size=2, dp_shard_size=2, cp_size=2, tp_size=2)
    assert config.active_mesh_dims == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert (config.dp_dim_names, config.non_dp_dim_names) == (["dp_replicate", "dp_shard"], ["pp", "cp", "tp"])
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert (config.dp_shard_cp_dim_names, config.fsdp_dim_names) == (
        ["dp_shard", "cp"],
        ["dp_replicate", "dp_shard_cp"],
    )
    assert config.model_shard_dim_names == ["pp", "dp_shard", "cp", "tp"]
    assert ParallelismConfig(dp_shard_size=2, sp_size=2).fsdp_dim_names == ["dp_shard"]
    assert ParallelismConfig(dp_replicate_size=2, cp_size=2).model_shard_dim_names == []


def test_handlers_come_from_arguments_then_variables(monkeypatch):
    config = ParallelismConfig(tp_size=2, cp_size=2, pp_handler="of pipelines")
    assert config.tp_handler == TorchTensorParallelConfig(enable_async_tp=False)
    assert config.cp_handler == TorchContextParallelConfig(cp_comm_strategy="allgather")
    assert config.handlers == {"pp": "of pipelines", "tp": config.tp_handler, "cp": config.cp_handler, "sp": None}
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    for name, value in {"CP_COMM_STRATEGY": "alltoall", "SP_SEQ_LENGTH": "64", "ENABLE_ASYNC_TP": "true"}.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", value)
    assert ParallelismConfig(cp_size=2).cp_handler.cp_comm_strategy == "alltoall"
    assert ParallelismConfig(sp_size=2).sp_handler == DeepSpeedSequenceParallelConfig(64, True, "sdpa")
    assert TorchTensorParallelConfig().enable_async_tp is True
    assert TorchContextParallelConfig("allgather").cp_comm_strategy == "allgather"


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: TorchContextParallelConfig("allgater"), ConfigError, "did you mean 'allgather'"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_seq_length=0), ConfigError, "sp_seq_length=0: expected a whole"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"), ConfigError, "one of sdpa, flash"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False), ConfigError, "give sp_seq_length"),
        (lambda: TorchTensorParallelConfig(enable_async_tp="maybe"), ConfigError, "enable_async_tp='maybe'"),
        (lambda: TorchTensorParallelConfig(plan="auto"), ConfigError, "plan is a str, not a mapping"),
        (lambda: TorchTensorParallelPlugin(tp_size=0), ConfigError, "TorchTensorParallelPlugin: tp_size=0"),
        (lambda: ParallelismConfig(cp_backend="jax"), ConfigError, "cp_backend='jax': expected one of torch"),
        (lambda: ParallelismConfig(tp_handler=TorchContextParallelConfig()), TypeError, "tp_handler is a TorchContext"),
        (lambda: ParallelismConfig(tp_size=2).get_device_mesh(), ConfigError, "make it first"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_the_older_plugin_is_a_size_and_says_so():
    def look():
        with pytest.warns(FutureWarning, match="ParallelismConfig"):
            accelerator = Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
        with pytest.raises(ConfigError, match="give parallelism_config alone"):
            Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(2), parallelism_config=ParallelismConfig(tp_size=2))
        return accelerator.ctx.topology.data_size, accelerator.parallelism_config.tp_size

    assert run_threads(2, look) == [(1, 2)] * 2


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "two"])
def test_a_size_is_a_number_of_processes(value, monkeypatch):
    with pytest.raises(ConfigError, match="tp_size="):
        ParallelismConfig(tp_size=value)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", str(value))
    with pytest.raises(ConfigError, match=r"PARALLELISM_CONFIG_CP_SIZE=.*at least 1"):
        ParallelismConfig()


def test_a_sequence_is_cut_in_one_way():
    with pytest.raises(ConfigError, match="choose one"):
        ParallelismConfig(cp_size=2, sp_size=2)


def test_an_accelerator_takes_the_layout_and_its_loaders_follow():
    def look(config):
        accelerator = Accelerator(parallelism_config=config)
        assert accelerator.parallelism_config is config
        return str(accelerator.ctx.topology), accelerator.ctx.topology.data_rank

    tensor = ParallelismConfig(dp_replicate_size=2, tp_size=2)
    assert run_threads(4, look, tensor) == [("dp_replicate 2 x tp 2", rank // 2) for rank in range(4)]
    assert run_threads(4, look, ParallelismConfig()) == [("dp_replicate 4", rank) for rank in range(4)]


def test_the_environment_turns_it_on(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert run_threads(2, lambda: Accelerator().ctx.topology.data_size) == [2, 2]
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert run_threads(2, lambda: Accelerator().ctx.topology.data_size) == [1, 1]
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "maybe")
    with pytest.raises(ValueError, match="ACCELERATE_USE_PARALLELISM_CONFIG='maybe': not a truth value"):
        Accelerator()


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        (ParallelismConfig(tp_size=3), ContextError, "tp 3 makes 3 ranks, but the run has 4"),
        (ParallelismConfig(dp_shard_size=4), ConfigError, "dp_shard_size=4 shards the model"),
        ("tp", TypeError, "parallelism_config is a str"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank_and_leaves_nothing_behind(config, kind, message):
    def ask():
        with pytest.raises(kind, match=message):
            Accelerator(parallelism_config=config)
        return Accelerator(mixed_precision="bf16").ctx.topology.data_size

    assert run_threads(4, ask) == [4] * 4


def test_training_over_a_dimension_that_nothing_serves_is_refused_by_name():
    def look():
        ctx = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=2)).ctx
        refuse_unserved(ctx, ("tp",))
        with pytest.raises(ContextError, match="parallelism_config asks for tp 2"):
            refuse_unserved(ctx, ("pp",))

    run_threads(4, look)


def test_a_mesh_has_the_dimensions_that_are_used(run_ranks):
    def build():
        config = ParallelismConfig(dp_replicate_size=2, tp_size=2)
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        own = config.build_device_mesh("cpu")
        assert config.get_device_mesh() is accelerator.torch_device_mesh is current_context().topology.mesh
        with pytest.raises(ContextError, match="tp_size 8 makes 8 processes"):
            ParallelismConfig(tp_size=8).build_device_mesh("cpu")
        with pytest.raises(ConfigError, match="tp_size=4 contradicts device_mesh, which has 2"):
            ParallelismConfig(device_mesh=own, tp_size=4)
        brought = ParallelismConfig(device_mesh=own)
        assert (brought.sizes, brought.get_device_mesh(), brought.build_device_mesh("cpu")) == (config.sizes, own, own)
        sharded = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2).build_device_mesh("cpu")
        return own.mesh_dim_names, own.mesh.tolist(), sharded["dp"].size(), sharded["dp_cp"].mesh.tolist()

    assert run_ranks(4, build) == [(("dp_replicate", "tp"), [[0, 1], [2, 3]], 4, [0, 1, 2, 3])] * 4
    assert Accelerator().torch_device_mesh is None
