"""Training with megatron-core on gloo ranks gives the losses and weights of one process without it."""

import pytest

RANKS_IMPORT = (
    "transformers.models.gpt2.modeling_gpt2",
    "orc.runtime.engine.megatron.model",
    "orc.runtime.engine.megatron.gpt2",
)
STEPS, ROWS, LENGTH, VOCABULARY = 3, 4, 12, 100


def gpt2(layers=4, dropout=0.0):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    shape = {"n_layer": layers, "n_head": 4, "n_embd": 16, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0))


def samples(count=STEPS * ROWS):
    import torch

    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :3] = -100  # they do not count; as many in each sample, as means of means need it
    return [{"input_ids": one, "labels": two} for one, two in zip(tokens, labels, strict=True)]


def optimizer_of(model):
    import torch

    plain = [one for one in model.parameters() if one.ndim == 1]
    others = [one for one in model.parameters() if one.ndim > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train(micro=ROWS, plugin=None, model=None, **more):
    """Losses, norms and final weights of a short training; with *plugin* by Megatron-LM."""
    import torch
    from torch.utils.data import DataLoader

    from orc.runtime import Accelerator

    accelerator = Accelerator(megatron_lm_plugin=plugin, **more)
    model = gpt2() if model is None else model
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), DataLoader(samples(), batch_size=micro))
    losses, norms = [], []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    model.eval()
    with torch.no_grad():
        losses.append(float(model(**{name: one.clone() for name, one in batch.items()}).loss))
    weights = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    return accelerator, model, optimizer, losses, norms, weights


def run_all(settings):
    """What `train` gives for each of *settings* in turn, on this rank."""
    import torch

    from orc.runtime import AcceleratorState, MegatronLMPlugin, gather_across_data_parallel_groups

    found = []
    for one in settings:
        micro = one.pop("micro")
        accelerator, _, _, losses, norms, weights = train(micro, MegatronLMPlugin(**one))
        facts = {"main": accelerator.is_main_process, "local_main": accelerator.is_local_main_process}
        facts["batch"] = accelerator.state.megatron_lm_plugin.global_batch_size
        facts["share"] = (accelerator.ctx.topology.data_rank, accelerator.ctx.topology.data_size)
        facts["kind"] = str(accelerator.distributed_type)
        facts["gathered"] = gather_across_data_parallel_groups(torch.tensor([accelerator.process_index])).tolist()
        found.append((losses, norms, weights, facts))
        AcceleratorState._reset_state()
    return found


@pytest.fixture(scope="module")
def alone(run_ranks):
    def plain():
        return train()[3:]

    return run_ranks(1, plain)[0]


def check_parity(found, alone):
    losses, norms, weights = alone
    for got_losses, got_norms, got_weights, _ in found:
        assert got_losses == pytest.approx(losses, abs=2e-5)
        assert got_norms == pytest.approx(norms, rel=1e-4)
        assert got_weights.keys() == weights.keys()
        for name, one in weights.items():
            assert (got_weights[name] - one).abs().max() < 2e-3 * max(1, one.abs().max()), name


def test_two_ranks_share_layers_or_stages_and_train_like_one_process(run_ranks, alone):
    settings = [
        {"micro": 4, "tp_degree": 2},
        {"micro": 2, "tp_degree": 2, "num_micro_batches": 2, "sequence_parallelism": True,
         "recompute_activations": True},
        {"micro": 2, "pp_degree": 2, "num_micro_batches": 2},
        {"micro": 2, "pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1},
        {"micro": 2},
    ]  # fmt: skip
    ranks = run_ranks(2, run_all, settings, timeout=240)
    for found in ranks:
        check_parity(found, alone)
    assert [[one["main"] for *_, one in found] for found in ranks] == [[False] * 5, [True] * 5]
    assert [[one["local_main"] for *_, one in found] for found in ranks] == [[False] * 5, [True] * 5]
    assert [one["batch"] for *_, one in ranks[0]] == [4] * 5
    assert [one["share"] for *_, one in ranks[1]] == [(0, 1)] * 4 + [(1, 2)]
    assert {one["kind"] for *_, one in ranks[0]} == {"MEGATRON_LM"}
    assert [one["gathered"] for *_, one in ranks[1]] == [[1]] * 4 + [[0, 1]]


def test_four_ranks_combine_tensor_pipeline_and_data_parallelism(run_ranks, alone):
    settings = [
        {"micro": 2, "tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2},
        {"micro": 1, "pp_degree": 2, "num_micro_batches": 2},
    ]
    ranks = run_ranks(4, run_all, settings, timeout=240)
    for found in ranks:
        check_parity(found, alone)
    assert [found[0][3]["main"] for found in ranks] == [False, False, False, True]
    assert [found[1][3]["share"] for found in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]  # stages are farthest apart


def test_a_checkpoint_is_that_of_a_transformers_model_and_loads_at_other_degrees(run_ranks, tmp_path):
    def first(place):
        from orc.runtime import MegatronLMPlugin

        plugin = MegatronLMPlugin(tp_degree=2)
        accelerator, model, optimizer, *_, weights = train(ROWS, plugin)
        accelerator.save_state(place)
        return weights, more_steps(accelerator, model, optimizer)

    def second(place):
        from torch.utils.data import DataLoader

        from orc.runtime import Accelerator, MegatronLMPlugin

        accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(pp_degree=2, num_micro_batches=2))
        model = gpt2()
        for parameter in model.parameters():
            parameter.data.zero_()
        model, optimizer, _ = accelerator.prepare(model, optimizer_of(model), DataLoader(samples(), batch_size=2))
        accelerator.load_state(place)
        return more_steps(accelerator, model, optimizer)

    def more_steps(accelerator, model, optimizer):
        import torch

        model.train()
        losses = []
        for _ in range(2):
            batch = {name: torch.stack([one[name] for one in samples(4)]) for name in ("input_ids", "labels")}
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(float(loss))
        return losses

    weights, losses = run_ranks(2, first, str(tmp_path / "saved"), timeout=120)[0]
    assert run_ranks(2, second, str(tmp_path / "saved"), timeout=120) == [pytest.approx(losses, abs=2e-5)] * 2

    from safetensors.torch import load_file

    model = gpt2()
    model.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"), strict=False)
    assert all((one == weights[name]).all() for name, one in model.named_parameters())


def test_what_cannot_be_is_refused_on_every_rank_alike_and_dropout_is_shared(run_ranks):
    def asked():
        from unittest import mock

        import torch
        from torch.optim.lr_scheduler import ConstantLR
        from torch.utils.data import DataLoader

        from orc.runtime import Accelerator, AcceleratorState, MegatronLMPlugin
        from orc.runtime import MegatronLMDummyDataLoader as Indexed
        from orc.runtime import MegatronLMDummyScheduler as Schedule

        said = []

        def refused(action):
            try:
                action()
            except (ValueError, RuntimeError, NotImplementedError) as error:
                said.append(f"{type(error).__name__}: {error}")

        for plugin, arguments in (
            ({"tp_degree": 3}, {}),
            ({"tp_degree": 2}, {"gradient_accumulation_steps": 2}),
            ({"tp_degree": 2}, {"mixed_precision": "bf16"}),
        ):
            refused(lambda p=plugin, a=arguments: Accelerator(megatron_lm_plugin=MegatronLMPlugin(**p), **a))
        accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, return_logits=True))
        refused(lambda: Accelerator(megatron_lm_plugin=MegatronLMPlugin()))
        model = gpt2(layers=1, dropout=0.5)
        optimizer = optimizer_of(model)
        refused(lambda: accelerator.prepare(optimizer))
        refused(lambda: accelerator.prepare(torch.nn.Linear(2, 2)))
        refused(lambda: accelerator.prepare(model, optimizer, ConstantLR(optimizer, factor=1.0)))
        refused(lambda: accelerator.prepare(model, optimizer, Indexed(data_path="x")))
        refused(lambda: accelerator.prepare_model(model))
        loader, schedule = DataLoader(samples(), batch_size=4), Schedule(optimizer, 10, warmup_num_steps=2)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        batch = next(iter(loader))
        refused(optimizer.step)
        output = model(**batch)
        refused(lambda: accelerator.backward(output.loss * 2))
        refused(lambda: model(input_ids=torch.zeros(1, 17, dtype=torch.long)))
        refused(lambda: model.megatron_generate(batch["input_ids"]))
        kind = type(optimizer.optimizer.inner)
        with mock.patch.object(kind, "prepare_grads", autospec=True, side_effect=kind.prepare_grads) as prepared:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert prepared.call_count == 1  # it divides by the loss scale
        rates = [schedule.get_last_lr()[0]]
        for _ in range(6):
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
        assert rates == pytest.approx([0, 0.005, 0.01, 0.00875, 0.0075, 0.00625, 0.005])
        shared = {name: one for name, one in model.named_parameters() if "layernorm" in name}
        facts = (float(output.loss), tuple(output.logits.shape), {name: one.detach() for name, one in shared.items()})
        AcceleratorState._reset_state()
        return said, facts

    (said, facts), (others, theirs) = run_ranks(2, asked, timeout=120)
    assert said == others
    expected = (
        "needs a multiple of 3 processes, and there are 2", "gradient_accumulation_steps=2: it must be 1",
        "on CPUs it trains in float32 only", "already: pass the plug-in to the first one",
        "prepare the model in the same call as its optimizer", "Linear is none of Transformers",
        "prepare a MegatronLMDummyScheduler", "indexed datasets of Megatron-LM are not read",
        "Megatron-LM needs the model with its optimizer", "there are no gradients",
        "pass the loss that it returned in training", "17 tokens per sample, the model has 16 positions",
        "megatron_generate is not supported",
    )  # fmt: skip
    assert [text for part, text in zip(expected, said, strict=True) if part not in text] == []
    assert facts[:2] == theirs[:2]
    assert facts[1] == (4, LENGTH, VOCABULARY)
    assert all((one == theirs[2][name]).all() for name, one in facts[2].items())  # the same masks outside the regions
