"""What Megatron-LM cannot do is refused on every rank alike; dropout is shared between the ranks where it must be."""

import pytest

RANKS_IMPORT = ("transformers.models.gpt2.modeling_gpt2", "orc.runtime.engine.megatron.model")


def gpt2():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 16, "n_positions": 16, "vocab_size": 100}
    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    return GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0))


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
            ({"tp_degree": 2}, {"mixed_precision": "fp8"}),
        ):
            refused(lambda p=plugin, a=arguments: Accelerator(megatron_lm_plugin=MegatronLMPlugin(**p), **a))
        accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, return_logits=True))
        refused(lambda: Accelerator(megatron_lm_plugin=MegatronLMPlugin()))
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        refused(lambda: accelerator.prepare(optimizer))
        refused(lambda: accelerator.prepare(torch.nn.Linear(2, 2)))
        refused(lambda: accelerator.prepare(model, optimizer, ConstantLR(optimizer, factor=1.0)))
        refused(lambda: accelerator.prepare(model, optimizer, Indexed(data_path="x")))
        refused(lambda: accelerator.prepare_model(model))
        loader, schedule = (
            DataLoader([{"input_ids": one} for one in torch.arange(144).view(12, 12) % 100], batch_size=4),
            Schedule(optimizer, 10, warmup_num_steps=2),
        )
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        batch = next(iter(loader))
        refused(optimizer.step)
        output = model(**batch)
        refused(lambda: accelerator.backward(output.loss * 2))
        refused(lambda: model(input_ids=torch.zeros(1, 17, dtype=torch.long)))
        prompts = batch["input_ids"]
        refused(lambda: model.megatron_generate(prompts, max_new_tokens=9))
        refused(lambda: model.megatron_generate(prompts, max_new_tokens=1, top_k=5, top_p=0.5))
        refused(lambda: model.megatron_generate(prompts, max_new_tokens=1, num_beams=2))
        refused(lambda: model.megatron_generate(prompts, prompts.new_tensor([[0, *[1] * 11]] * 4), max_new_tokens=1))
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
        "it trains in no, fp16 or bf16", "already: pass the plug-in to the first one",
        "prepare the model in the same call as its optimizer", "Linear is none of Transformers",
        "prepare a MegatronLMDummyScheduler", "there is no file x.bin",
        "Megatron-LM needs the model with its optimizer", "there are no gradients",
        "pass the loss that it returned in training", "17 tokens per sample, the model has 16 positions",
        "do not fit the model's 16 positions", "give top_k or top_p, not both", "one prompt at a time",
        "padded on the left",
    )  # fmt: skip
    assert [text for part, text in zip(expected, said, strict=True) if part not in text] == []
    assert facts[:2] == theirs[:2]
    assert facts[1] == (4, 12, 100)
    assert all((one == theirs[2][name]).all() for name, one in facts[2].items())  # the same masks outside the regions
