"""Training in fp8 by Transformer Engine and by MS-AMP, against doubles that record how they are called.

Neither library computes without an NVIDIA GPU. What is shown is which layers are replaced, which recipe is made of the
options, and what reaches the optimizer and a checkpoint; not that the libraries do with it what they say.
"""

import pytest
import torch
from torch import nn

from orc.runtime import (
    Accelerator,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 16)
        self.inner, self.norm, self.odd = nn.Linear(16, 32, bias=False), nn.LayerNorm(32, eps=1e-3), nn.Linear(32, 12)
        self.back, self.head = nn.Linear(12, 16), nn.Linear(16, 8, bias=False)
        self.wide = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 8, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, inputs):
        return self.tied(self.wide(self.back(self.odd(self.norm(self.inner(self.embedding(inputs)))))))


def step(accelerator, model, optimizer):
    loss = model(torch.arange(8)).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def te_accelerator(**options):
    return Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[TERecipeKwargs(**options)])


def test_linear_layers_and_layer_norms_become_those_of_transformer_engine_and_back(transformer_engine):
    te, model, whole = transformer_engine.te, Network(), Network().state_dict()
    assert not has_transformer_engine_layers(model)
    convert_model(model)
    assert has_transformer_engine_layers(model)
    assert {name for name, layer in model.named_children() if isinstance(layer, te.Linear)} == {"inner", "wide"}
    assert isinstance(model.norm, te.LayerNorm)
    assert transformer_engine.layers == [
        ("Linear", 16, 32, False, torch.float32),
        ("LayerNorm", 32, 1e-3, torch.float32),
        ("Linear", 16, 16, True, torch.float32),
    ]
    assert model.tied.weight is model.embedding.weight
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    assert len(model.state_dict()) == len(whole)
    for options, kind in (({"_convert_linear": False}, te.LayerNorm), ({"_convert_ln": False}, te.Linear)):
        model = Network()
        convert_model(model, **options)
        assert {type(layer) for layer in model.children() if hasattr(layer, "get_extra_state")} >= {kind}
        assert len({type(layer) for layer in model.children()} & {te.Linear, te.LayerNorm}) == 1


def test_a_model_trains_under_its_autocast_and_is_evaluated_without_unless_asked_for(transformer_engine):
    accelerator = te_accelerator(margin=1, amax_history_len=16, amax_compute_algo="max", fp8_format="E4M3")
    assert accelerator.fp8_backend == "TE"
    model = Network()
    given = model.inner.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model.inner.weight is not given  # the optimizer trains the new ones
    before = model.inner.weight.detach().clone()
    first = step(accelerator, model, optimizer)
    assert not torch.equal(model.inner.weight, before)
    assert step(accelerator, model, optimizer) < first
    enabled, recipe = transformer_engine.autocast[-1]
    kind = transformer_engine.recipe
    assert enabled
    assert recipe == kind.DelayedScaling(
        margin=1, fp8_format=kind.Format.E4M3, amax_history_len=16, amax_compute_algo="max"
    )
    model.eval()
    assert model(torch.arange(8)).dtype is torch.float32
    assert not transformer_engine.autocast[-1][0]
    assert transformer_engine.in_fp8[0]
    assert not transformer_engine.in_fp8[-1]
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare.forward.__func__ is Network.forward
    again = apply_fp8_autowrap(bare, TERecipeKwargs(use_autocast_during_eval=True, use_mxfp8_block_scaling=True))
    apply_fp8_autowrap(again)  # a second time changes nothing
    again(torch.arange(8))
    assert transformer_engine.autocast[-1] == (True, kind.MXFP8BlockScaling(fp8_format=kind.Format.HYBRID))
    contextual_fp8_autocast(Network().forward, "recipe")(torch.arange(8))
    assert transformer_engine.autocast[-1] == (True, "recipe")


def test_what_the_installed_transformer_engine_no_longer_has_is_refused_if_it_is_asked_for(transformer_engine):
    with pytest.raises(ValueError, match="interval=2: the installed Transformer Engine has no such option any more"):
        te_accelerator(interval=2).prepare(Network())


def test_a_checkpoint_of_transformer_engine_has_the_names_of_any_other(transformer_engine, tmp_path):
    accelerator = te_accelerator()
    model = Network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save_state(tmp_path / "state")
    state = accelerator.get_state_dict(model)
    assert set(state) == set(Network().state_dict())
    Network().load_state_dict(state)
    saved = state["inner.weight"].clone()
    step(accelerator, model, optimizer)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.inner.weight, saved)


def test_transformer_engine_trains_copies_and_shards_and_compiled_models_alike(run_ranks, on_ranks):
    def work(*ways):
        from orc.runtime import AcceleratorState

        found = {}
        plugins = {f"FSDP{one}": FullyShardedDataParallelPlugin(fsdp_version=one, auto_wrap_policy="no_wrap",
                                                                use_orig_params=True) for one in (1, 2)}  # fmt: skip
        for way in ways:
            with pytest.MonkeyPatch.context() as patch:
                calls = on_ranks(patch)
                accelerator = Accelerator(
                    mixed_precision="fp8", cpu=True, kwargs_handlers=[TERecipeKwargs()], fsdp_plugin=plugins.get(way),
                    dynamo_backend="eager" if way == "torch.compile" else None,
                )  # fmt: skip
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model, optimizer = accelerator.prepare(model, optimizer)
                losses = []
                for _ in range(3):
                    loss = model(torch.full((2, 16), accelerator.process_index + 1.0)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                state = {name: one.shape for name, one in accelerator.get_state_dict(model).items()}
                found[way] = losses, state, bool(calls.in_fp8) and all(calls.in_fp8), len(calls.autocast)
                AcceleratorState._reset_state()
        return found

    # Compiled here: torch looks for the double's module by its name, which the ranks do not have.
    first, second = run_ranks(2, work, "DDP", "FSDP1", "FSDP2", timeout=120)
    for found in (first, second, work("alone", "torch.compile")):
        losses, state, *_ = next(iter(found.values()))
        assert losses[2] < losses[0]
        for way, (got, names, in_fp8, entered) in found.items():
            assert got == pytest.approx(losses, rel=0.02), way
            assert names == state or (found is second and not names)  # shards are gathered on the first rank
            assert in_fp8, way
            assert entered >= 3, way


def test_ms_amp_replaces_a_model_with_its_optimizer(msamp):
    with pytest.warns(FutureWarning):
        options = FP8RecipeKwargs(backend="msamp", optimization_level="O2")
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[options])
    assert accelerator.fp8_backend == "MSAMP"
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert msamp == ["O2"]
    assert type(model[0]).__name__ == "FP8Linear"
    assert type(optimizer.optimizer).__name__ == "LBAdamW"
    before = model[0].weight.detach().clone()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    assert msamp == ["O2"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ms_amp_is_refused_where_it_cannot_be(msamp, level):
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[MSAMPRecipeKwargs(opt_level=level)])
    model = nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"together: accelerator.prepare\(model, optimizer\) with one of each"):
        accelerator.prepare(model)
    if level == "O2":
        with pytest.raises(ValueError, match="keeps the states of Adam in 8 bits"):
            accelerator.prepare(model, sgd)
        assert msamp == []
    else:
        accelerator.prepare(model, sgd)
        assert msamp == ["O1"]


def test_ms_amp_does_not_train_shards():
    from orc.runtime.parallel.precision.fp8.msamp import MSAMP

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), cpu=True)
    assert "does not train shards" in MSAMP(MSAMPRecipeKwargs()).requires(accelerator.ctx)
