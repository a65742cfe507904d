"""Training in float8 by torchao, for real: on a CPU it emulates what a Hopper GPU computes."""

import copy
import warnings

import pytest
import torch
from torch import nn

from orc.runtime import (
    Accelerator,
    AcceleratorState,
    AORecipeKwargs,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    convert_model_to_fp8_ao,
    has_ao_layers,
    load_checkpoint_in_model,
)

RANKS_IMPORT = (
    *("deepspeed", "torchao.float8", "transformers.models.llama.modeling_llama"),
    *("torch._functorch.partitioners", "torch._inductor.lowering", "networkx"),
)
pytestmark = pytest.mark.filterwarnings("ignore:mixed_precision=fp8 on a CPU")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 4))
    )


def fresh():
    """No context of this process; a rank may train several ways, one after the other."""
    AcceleratorState._reset_state(reset_partial_state=False)


def trained(precision, steps=30, accumulate=1, plugin=None, **options):
    """Losses of all ranks together over *steps* steps; the Accelerator, the model and the optimizer."""
    fresh()
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, fsdp_plugin=plugin, gradient_accumulation_steps=accumulate, **options
    )
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(steps * accumulate):
        inputs = torch.randn(16, 16, generator=generator)
        with accelerator.accumulate(model):
            loss = (model(inputs) - 2 * inputs[:, :4]).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, accelerator, model, optimizer


def kinds(model):
    return [type(layer).__name__ for layer in model.modules() if isinstance(layer, nn.Linear)]


def near(one, other):
    """Whether two losses agree as far as three bits of mantissa let them, over the last steps."""
    mean = lambda losses: sum(losses[-10:]) / 10  # noqa: E731
    return abs(mean(one) - mean(other)) < 0.15 * mean(other)


def test_losses_in_float8_stay_near_those_in_full_precision():
    full, *_ = trained("no")
    low, accelerator, model, _ = trained("fp8")
    assert low != full
    assert near(low, full)
    assert low[-1] < 0.7 * low[0]
    assert (accelerator.fp8_backend, accelerator.state.mixed_precision) == ("AO", "fp8")
    assert kinds(model) == ["Linear", "Float8Linear", "Float8Linear", "Linear"]
    assert model(torch.ones(1, 16)).dtype is torch.float32
    assert near(trained("fp8", accumulate=2)[0], trained("no", accumulate=2)[0])
    assert trained("fp8", steps=5, dynamo_backend="aot_eager")[0] == pytest.approx(low[:5], rel=0.02)


def test_only_layers_that_fit_are_replaced_and_a_filter_chooses_others():
    model = nn.ModuleDict(
        {
            "first": nn.Linear(16, 16),
            "odd": nn.Linear(16, 12),
            "attention": nn.MultiheadAttention(16, 2),
            "fit": nn.Linear(32, 16, bias=False),
            "last": nn.Linear(16, 16),
        }
    )
    before = dict(model.named_parameters())
    converted = convert_model_to_fp8_ao(model)
    assert {name for name, layer in converted.named_modules() if has_ao_layers(layer)} == {"", "fit"}
    assert all(parameter is before[name] for name, parameter in converted.named_parameters())  # optimizers go on

    recipe = AORecipeKwargs(module_filter_func=lambda module, name: name == "0")
    assert kinds(trained("fp8", steps=1, kwargs_handlers=[recipe])[2]) == ["Float8Linear", "Linear", "Linear", "Linear"]


def test_what_is_evaluated_only_and_what_is_converted_already_stay_as_they_are():
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    assert not has_ao_layers(accelerator.prepare_model(network(), evaluation_mode=True))
    own = convert_model_to_fp8_ao(network(), module_filter_func=lambda module, name: name == "2")
    assert kinds(accelerator.prepare(own)) == ["Linear", "Float8Linear", "Linear", "Linear"]


def test_a_model_without_such_layers_trains_in_bfloat16_and_says_so():
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    with pytest.warns(UserWarning, match="no layer of the model computes in fp8"):
        model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert not has_ao_layers(model)


def test_emulation_is_said_once(monkeypatch):
    from orc.runtime.parallel.precision.fp8 import ao

    ao._warn_of_emulation.cache_clear()
    with pytest.warns(UserWarning, match="on a CPU: torchao emulates float8"):
        Accelerator(mixed_precision="fp8", cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(mixed_precision="fp8", cpu=True)


def test_options_of_torchao_reach_its_layers_and_must_not_contradict_its_configuration():
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig(round_scales_to_power_of_2=True)
    model = trained("fp8", steps=1, kwargs_handlers=[AORecipeKwargs(config=config)])[2]
    assert model[2].config.round_scales_to_power_of_2
    assert model[2].config.emulate
    model = trained("fp8", steps=1, kwargs_handlers=[AORecipeKwargs(pad_inner_dim=True)])[2]
    assert model[2].config.pad_inner_dim
    with pytest.raises(ValueError, match="pad_inner_dim=True contradicts config, which says False"):
        AORecipeKwargs(config=config, pad_inner_dim=True)


def test_models_whose_layers_cannot_be_replaced_are_refused():
    accelerator = Accelerator(
        mixed_precision="fp8", cpu=True, kwargs_handlers=[AORecipeKwargs(enable_fsdp_float8_all_gather=True)]
    )
    with pytest.raises(ValueError, match="enable_fsdp_float8_all_gather needs shards of version 2 of FSDP"):
        accelerator.prepare(network())
    hooked = network()
    hooked[2]._hf_hook = object()
    with pytest.raises(ValueError, match="the model has hooks"):
        accelerator.prepare(hooked)


def test_a_checkpoint_of_a_run_in_float8_continues_in_bfloat16_and_back(tmp_path):
    _, accelerator, model, _ = trained("fp8", steps=5)
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    plain = network()
    load_checkpoint_in_model(plain, tmp_path / "model")
    assert all(torch.equal(value, saved[name]) for name, value in plain.state_dict().items())
    for precision in ("bf16", "fp8"):
        _, other, again, _ = trained(precision, steps=1)
        other.load_state(tmp_path / "state")
        assert all(torch.equal(value, saved[name]) for name, value in other.get_state_dict(again).items())
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare.forward.__func__ is nn.Sequential.forward
    assert copy.deepcopy(model)(torch.ones(1, 16)).equal(model(torch.ones(1, 16)))


WAYS = ("replicas", "fsdp1", "fsdp2", "compressed", "recomputed", "compiled", "gathered")


def test_replicas_and_shards_train_in_float8_on_two_ranks(run_ranks, tmp_path):
    def run():
        def plugin(version, **options):
            return FullyShardedDataParallelPlugin(fsdp_version=version, **options)

        units = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
        gathering = [AORecipeKwargs(enable_fsdp_float8_all_gather=True)]
        ways = {
            "replicas": {},
            "fsdp1": {"plugin": plugin(1)},
            "fsdp2": {"plugin": plugin(2)},
            "compressed": {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]},
            "recomputed": {
                "plugin": plugin(2, activation_checkpointing=True, cpu_offload=True, **units),
                "kwargs_handlers": gathering,
            },
            "compiled": {"plugin": plugin(2), "dynamo_backend": "aot_eager"},
            "gathered": {"plugin": plugin(2), "kwargs_handlers": gathering},
        }
        full, *_ = trained("no")
        result = {}
        for name, options in ways.items():
            losses, accelerator, model, _ = trained("fp8", **options)
            state = accelerator.get_state_dict(model)
            accelerator.save_state(tmp_path / name)
            result[name] = (near(losses, full), kinds(accelerator.unwrap_model(model)).count("Float8Linear"))
            if name == "gathered":
                inner = model[2].weight._local_tensor
                assert type(inner).__name__ == "WeightWithDynamicFloat8CastTensor"
                assert {type(value) for value in state.values()} <= {torch.Tensor}
                whole = state
        for precision, options in (("bf16", {"plugin": plugin(2)}), ("fp8", {"plugin": plugin(2)})):
            _, accelerator, model, _ = trained(precision, steps=1, **options)
            accelerator.load_state(tmp_path / "gathered")
            again = accelerator.get_state_dict(model)
            result[f"{precision} continues"] = all(torch.equal(value, whole[name]) for name, value in again.items())
        fresh()
        tied = network()
        tied[4].weight = tied[2].weight
        accelerator = Accelerator(mixed_precision="fp8", fsdp_plugin=plugin(2), kwargs_handlers=gathering, cpu=True)
        with pytest.raises(ValueError, match=r"2\.weight and 4\.weight are one tensor"):
            accelerator.prepare(tied)
        return result

    expected = dict.fromkeys(WAYS, (True, 2))
    expected |= {"bf16 continues": True, "fp8 continues": True}
    assert run_ranks(2, run, timeout=240) == [expected] * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_trains_in_float8_on_two_ranks(run_ranks, stage):
    def run():
        from orc.runtime import DeepSpeedPlugin

        result = {}
        for precision in ("bf16", "fp8"):
            fresh()
            plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, zero3_save_16bit_model=True)
            accelerator = Accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=plugin)
            model = network()
            rows = torch.randn(12 * 32, 16, generator=torch.Generator().manual_seed(0))
            model, optimizer, loader = accelerator.prepare(
                model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.utils.data.DataLoader(rows, batch_size=16)
            )
            losses = []
            for inputs in loader:
                loss = (model(inputs).float() - 2 * inputs[:, :4]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                network().load_state_dict(state)
            result[precision] = losses, kinds(model)
        losses, layers = result["fp8"]
        return near(losses, result["bf16"][0]), losses != result["bf16"][0], layers.count("Float8Linear")

    assert run_ranks(2, run, timeout=200) == [(True, True, 2)] * 2


@pytest.mark.parametrize(("dimension", "shard"), [("tp", True), ("cp", False), ("sp", False)])
def test_models_whose_layers_or_sequences_are_shared_out_train_in_float8(run_ranks, dimension, shard):
    def run():
        from transformers import LlamaConfig, LlamaForCausalLM

        from orc.runtime import ParallelismConfig

        sizes = {f"{dimension}_size": 2} | ({"sp_backend": "torch"} if dimension == "sp" else {})
        gathering = [AORecipeKwargs(enable_fsdp_float8_all_gather=True)]
        if shard:
            sizes["dp_shard_size"] = 2
        result = {}
        for precision in ("bf16", "fp8"):
            fresh()
            torch.manual_seed(0)
            options = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
            model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=48, **options))
            accelerator = Accelerator(
                cpu=True,
                mixed_precision=precision,
                parallelism_config=ParallelismConfig(**sizes),
                fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if shard else None,
                kwargs_handlers=gathering if shard and precision == "fp8" else [],
            )
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
            losses = []
            for _ in range(5):
                tokens = torch.arange(32).reshape(2, 16) % 7
                if dimension == "sp":
                    tokens = tokens.chunk(2, 1)[accelerator.process_index]
                labels = tokens.clone()
                with accelerator.maybe_context_parallel([tokens, labels], [1, 1]):
                    loss = model(input_ids=tokens, labels=labels).loss
                    accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            result[precision] = losses
        assert result["fp8"] == pytest.approx(result["bf16"], rel=0.05)
        return kinds(model).count("Float8Linear"), result["fp8"][-1] < result["fp8"][0] - 0.5

    ranks = 4 if shard else 2
    assert run_ranks(ranks, run, timeout=240) == [(13, True)] * ranks


def test_a_model_that_the_script_has_sharded_is_refused_unless_it_has_converted_it(run_ranks):
    def run():
        from torch.distributed.fsdp import fully_shard

        accelerator = Accelerator(mixed_precision="fp8", cpu=True)
        sharded = fully_shard(network())
        with pytest.raises(ValueError, match="the model is sharded already"):
            accelerator.prepare(sharded)
        model = convert_model_to_fp8_ao(network(), module_filter_func=lambda module, name: name == "2")
        return kinds(accelerator.prepare(fully_shard(model))).count("Float8Linear")

    assert run_ranks(2, run, timeout=120) == [1, 1]
