"""Sequence parallelism by DeepSpeed on two processes: a documented program learns what one process learns."""

import warnings

import pytest

RANKS_IMPORT = ("deepspeed", "transformers.models.llama.modeling_llama")
VOCABULARY, LENGTH, BATCH, STEPS, ACCUMULATION, NORM = 32, 16, 2, 3, 2, 2.0


def llama(**options):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}))


def rows():
    import torch

    tokens = torch.randint(0, VOCABULARY, (STEPS * ACCUMULATION * BATCH, LENGTH), generator=torch.manual_seed(1))
    labels = tokens.clone()
    labels[:, :5] = -100  # a prompt: pieces have different numbers of labels
    return [{"input_ids": row, "labels": marked} for row, marked in zip(tokens, labels, strict=True)]


def accelerator_for(stage, **options):
    from orc.runtime import Accelerator, DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig

    config = {
        "sp_handler": DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation=options.pop("attention", "sdpa")
        ),
        "dp_shard_size": 1,
    }
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=NORM, zero3_save_16bit_model=True)
    return Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(sp_size=2, **config, **options),
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
    )


def documented(accelerator, model, loader, optimizer, save):
    """The loop of the documentation: each process's loss counts by its labels; losses, norms, and what *save* gave."""
    import torch

    group, losses, norms = accelerator.torch_device_mesh["sp"].get_group(), [], []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss, labels = model(**batch).loss, batch["shift_labels"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it
                each = torch.distributed.nn.functional.all_gather(loss, group=group)
                counts = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
            total = sum(each[rank] * counts[rank] for rank in range(2) if counts[rank] > 0)
            loss = total / max(sum(counts), 1)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), NORM)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number + 1 == ACCUMULATION:
            save()
    return losses, norms


def learned(folder):
    """Losses, norms and the largest difference of a weight for each stage of ZeRO, then what is refused."""
    import torch

    from orc.runtime import AcceleratorState

    results = {}
    for stage in (2, 3):
        accelerator = accelerator_for(stage)
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        prepared = accelerator.prepare(model, torch.utils.data.DataLoader(rows(), batch_size=BATCH), optimizer)
        saved = f"{folder}/{stage}"
        found = documented(accelerator, *prepared, lambda at=saved, to=accelerator: to.save_state(at))
        state = accelerator.get_state_dict(prepared[0])
        accelerator.load_state(saved)
        again = documented(accelerator, *prepared, lambda: None)
        results[stage] = (*found, again[0], state and {name: value.clone() for name, value in state.items()})
        AcceleratorState._reset_state(reset_partial_state=False)
    return results, list(refused())


def refused():
    """Return the refusals of settings that DeepSpeed does not compute, made before anything is."""
    import torch

    from orc.runtime import AcceleratorState, ContextError

    tried = [
        (torch.nn.Linear(2, 2), 2, {}),
        (llama(), 0, {}),
        (llama(attn_implementation="eager"), 2, {}),
        (llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=24), 2, {}),
        (llama(), 2, {"sp_backend": "torch"}),
    ]
    for model, stage, options in tried:
        loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH)
        with pytest.raises(ContextError, match="sequence parallelism: ") as error:
            accelerator_for(stage, **options).prepare(model, torch.optim.SGD(model.parameters()), loader)
        yield str(error.value)
        AcceleratorState._reset_state(reset_partial_state=False)


def test_a_documented_program_learns_what_one_process_learns(run_ranks, tmp_path):
    import torch

    ranks = run_ranks(2, learned, str(tmp_path), timeout=200)
    plain, losses, norms = llama(), [], []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    data = rows()
    for number in range(STEPS * ACCUMULATION):
        loss = plain(**torch.utils.data.default_collate(data[number * BATCH :][:BATCH])).loss
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if number % ACCUMULATION == ACCUMULATION - 1:
            norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), NORM)))
            optimizer.step()
            optimizer.zero_grad()
    for results, said in ranks:
        for stage, (mine, before_clipping, resumed, state) in results.items():
            assert mine == pytest.approx(losses, rel=1e-5), stage
            assert before_clipping == pytest.approx(norms, rel=1e-4), stage
            assert resumed == pytest.approx(losses[ACCUMULATION:], rel=1e-5), stage
            for name, value in plain.state_dict().items() if state else ():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
        for text, part in zip(
            said,
            (
                "for models of Transformers, and this is a Linear",
                "with ZeRO stage 1, 2 or 3, and the stage is 0",
                "LlamaForCausalLM has attn_implementation='eager'",
                "3 attention heads cannot be shared out to sp_size=2",
                "sp_backend='torch' does not go together with DeepSpeed's engine",
            ),
            strict=True,
        ):
            assert part in text
    assert any(state for results, _ in ranks for *_, state in results.values())
