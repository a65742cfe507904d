"""Training with megatron-core on gloo ranks gives the losses and weights of one process without it.

All that two ranks do is done in one run of them: to import the libraries takes longer than to train.
"""

import itertools
import re
from pathlib import Path

import pytest

RANKS_IMPORT = (
    *(f"transformers.models.{one}.modeling_{one}" for one in ("gpt2", "megatron_bert", "t5", "mt5")),
    *(f"orc.runtime.engine.megatron.{one}" for one in ("model", "gpt2", "bert", "t5", "generation", "indexed")),
)
PAGE = Path(__file__).parents[4] / "docs" / "reference" / "compatibility.md"
STEPS, ROWS, LENGTH, VOCABULARY = 3, 4, 12, 100
GPT = (
    {"micro": 4, "tp_degree": 2},
    {"micro": 2, "tp_degree": 2, "num_micro_batches": 2, "sequence_parallelism": True, "recompute_activations": True},
    {"micro": 2, "pp_degree": 2, "num_micro_batches": 2},
    {"micro": 2, "pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1},
    {"micro": 2, "return_logits": True, "use_distributed_optimizer": True},
)
OTHERS = (
    ("MegatronBertForPreTraining", {"micro": 2, "pp_degree": 2, "num_micro_batches": 2}),
    ("MegatronBertForMaskedLM", {"micro": 4, "tp_degree": 2}),
    ("MegatronBertForSequenceClassification", {"micro": 2, "pp_degree": 2, "num_micro_batches": 2}),
    ("T5ForConditionalGeneration", {"micro": 4, "tp_degree": 2, "recompute_activations": True}),
    ("MT5ForConditionalGeneration", {"micro": 4, "tp_degree": 2}),
)
VARIANTS = ({"position_embedding_type": "rotary"}, {"position_embedding_type": "alibi"},
            {"attention_head_type": "multiquery"})  # fmt: skip


def gpt2(layers=4, dropout=0.0, **more):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    shape = {"n_layer": layers, "n_head": 4, "n_embd": 16, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0, **more))


def other(name):
    """A small model of Transformers' class *name*."""
    import torch
    import transformers

    torch.manual_seed(0)
    if name.startswith("MegatronBert"):
        shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
        config = transformers.MegatronBertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **shape, **rates)
    else:
        kind = name.removesuffix("ForConditionalGeneration")
        shape = {"num_layers": 2, "num_decoder_layers": 1, "num_heads": 4, "d_model": 16, "d_kv": 8, "d_ff": 32}
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **shape
        )
    return getattr(transformers, name)(config)


def samples(count=STEPS * ROWS, name="GPT2LMHeadModel"):
    import torch

    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :3] = -100  # they do not count; as many in each sample, as means of means need it
    found = []
    for index, (one, two) in enumerate(zip(tokens, labels, strict=True)):
        sample = {"input_ids": one, "labels": two}
        if name != "GPT2LMHeadModel":
            mask = torch.ones_like(one)
            mask[LENGTH - index % 3 :] = 0  # samples of different lengths
            sample["attention_mask"] = mask
        if name.startswith("MegatronBert"):
            sample["token_type_ids"] = one % 2
        if name.endswith("PreTraining"):
            sample["next_sentence_label"] = one[0] % 2
        if name.endswith("Classification"):
            sample["labels"] = one[0] % 3
        if name.endswith("ConditionalGeneration"):
            sample["labels"] = two[:7]
        found.append(sample)
    return found


def indexed(folder):
    """An indexed dataset of ten documents of ten tokens each, in *folder*."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{folder}/corpus.bin", dtype=numpy.int32)
    for document in torch.arange(VOCABULARY).view(10, 10):
        builder.add_item(document)
        builder.end_document()
    builder.finalize(f"{folder}/corpus.idx")
    return f"{folder}/corpus"


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
    loader = DataLoader(samples(name=type(model).__name__), batch_size=micro)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
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
        output = model(**{name: one.clone() for name, one in batch.items()})
    losses.append(float(output.loss))
    weights = {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "weights": weights}, accelerator, model, optimizer, output, batch


def trained_gpt(settings):
    """What `train` gives with *settings* on this rank, and facts of the run."""
    from orc.runtime import AcceleratorState, MegatronLMPlugin, gather_across_data_parallel_groups

    settings = dict(settings)
    found, accelerator, _, _, output, batch = train(settings.pop("micro"), MegatronLMPlugin(**settings))
    found["main"] = (accelerator.is_main_process, accelerator.is_local_main_process)
    found["batch"] = accelerator.state.megatron_lm_plugin.global_batch_size
    found["share"] = (accelerator.ctx.topology.data_rank, accelerator.ctx.topology.data_size)
    found["kind"] = str(accelerator.distributed_type)
    if output.logits is not None:
        found["logits"] = gather_across_data_parallel_groups((batch["input_ids"], output.logits.contiguous()))
    AcceleratorState._reset_state()
    return found


def variant(options, **plugin):
    """What training a GPT with other positions or heads gives; with which loss GPT-BigCode has one head of keys."""
    from orc.runtime import AcceleratorState, MegatronLMPlugin

    found = train(ROWS, MegatronLMPlugin(other_megatron_args=options, **plugin))[0]
    AcceleratorState._reset_state()
    return found


def resumed(place, saved, loaded, precision):
    """Losses after a checkpoint, of the run that saved it and of one that loaded it at another layout."""
    import torch
    from torch.utils.data import DataLoader

    from orc.runtime import Accelerator, AcceleratorState, MegatronLMPlugin

    def more_steps(accelerator, model, optimizer):
        model.train()
        share = accelerator.ctx.topology.data_rank * ROWS // accelerator.ctx.topology.data_size
        rows = samples(4)[share : share + ROWS // accelerator.ctx.topology.data_size]
        losses = []
        for _ in range(2):
            batch = {name: torch.stack([one[name] for one in rows]) for name in ("input_ids", "labels")}
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(float(loss))
        return losses

    saved, loaded = dict(saved), dict(loaded)
    found, accelerator, model, optimizer, *_ = train(
        saved.pop("micro"), MegatronLMPlugin(**saved), mixed_precision=precision
    )
    accelerator.save_state(place)
    before = more_steps(accelerator, model, optimizer)
    accelerator.end_training()
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=precision, megatron_lm_plugin=MegatronLMPlugin(**loaded))
    model = gpt2()
    for parameter in model.parameters():
        parameter.data.zero_()
    model, optimizer, _ = accelerator.prepare(model, optimizer_of(model), DataLoader(samples(), batch_size=2))
    accelerator.load_state(place)
    after = more_steps(accelerator, model, optimizer)
    accelerator.end_training()
    AcceleratorState._reset_state()
    return {"weights": found["weights"], "before": before, "after": after}


def speaker():
    """A GPT whose scores are far apart, and prompts for it."""
    import torch

    model = gpt2(layers=2, initializer_range=0.4)
    return model, torch.randint(1, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))


def generated(**plugin):
    """What a GPT on these ranks says after prompts, in several ways."""
    import torch

    from orc.runtime import Accelerator, AcceleratorState, MegatronLMPlugin

    model, prompts = speaker()
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**plugin))
    model, _ = accelerator.prepare(model, optimizer_of(model))
    shorter = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    drawing = {"random_seed": 5, "temperature": 0.9}
    found = {
        "greedy": model.megatron_generate(prompts, max_new_tokens=8),
        "padded": model.megatron_generate(prompts, shorter, max_new_tokens=6),
        "beams": model.megatron_generate(prompts[:1], max_new_tokens=8, num_beams=4, length_penalty=1.5),
        "one": model.megatron_generate(prompts, max_new_tokens=8, top_k=1),
        "narrow": model.megatron_generate(prompts, max_new_tokens=8, top_p=1e-6, add_BOS=True),
        "top_k": model.megatron_generate(prompts, max_new_tokens=8, top_k=50, **drawing),
        "top_p": model.megatron_generate(prompts, max_new_tokens=8, top_p=0.99, top_p_decay=0.9, **drawing),
        "shared": model.megatron_generate(prompts, max_new_tokens=8, top_k=50),
    }
    AcceleratorState._reset_state()
    return {name: one.tolist() for name, one in found.items()}


def combined():
    """For each thing that Megatron-LM is combined with, the losses of a training or why there is none."""
    from orc.runtime import (
        AcceleratorState,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        MegatronLMPlugin,
        ParallelismConfig,
    )

    more = {
        "FSDP1": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
        "FSDP2": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        "DeepSpeed": {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)},
        **{one: {"parallelism_config": ParallelismConfig(**{f"{one}_size": 2})} for one in ("tp", "cp")},
        "sp": {"parallelism_config": ParallelismConfig(sp_size=2, sp_backend="torch")},
        "pp": {"parallelism_config": ParallelismConfig(pp_size=2)},
        **{one: {"mixed_precision": one} for one in ("bf16", "fp16", "fp8")},
        "accumulation": {"gradient_accumulation_steps": 2},
        "gradient compression": {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]},
        "torch.compile": {"dynamo_backend": "aot_eager"},
    }
    found = {}
    for name, options in more.items():
        try:
            found[name] = train(2, MegatronLMPlugin(), **options)[0]["losses"]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        AcceleratorState._reset_state()
    return found


def from_documents(path):
    """Batches of the splits of an indexed dataset, and the loss of one, on a copy of the model."""
    from orc.runtime import Accelerator, AcceleratorState, MegatronLMDummyDataLoader, MegatronLMPlugin

    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin())
    accelerator.state.megatron_lm_plugin.megatron_dataset_flag = True
    placeholder = MegatronLMDummyDataLoader(data_path=path, splits_string="9,1,0", seq_length=8, micro_batch_size=2)
    model = gpt2()
    model, optimizer, train, valid, none = accelerator.prepare(
        model, optimizer_of(model), placeholder, placeholder, placeholder
    )
    batch = next(train)
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    found = {"batch": batch, "loss": float(loss), "valid": next(valid)["input_ids"], "none": none}
    found["consumed"], found["total"] = train.consumed, accelerator.state.megatron_lm_plugin.global_batch_size
    AcceleratorState._reset_state()
    return found


def told_apart():
    """What is said of an optimizer that trains values otherwise than queries."""
    import torch

    from orc.runtime import Accelerator, AcceleratorState, MegatronLMPlugin

    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(pp_degree=2))
    model = other("MegatronBertForMaskedLM")
    groups = [{"params": [one for name, one in model.named_parameters() if (".value." in name) == chosen], "lr": lr}
              for chosen, lr in ((True, 0.1), (False, 0.2))]  # fmt: skip
    with pytest.raises(ValueError, match="are one weight in Megatron-LM's model") as refused:
        accelerator.prepare(model, torch.optim.AdamW(groups))
    AcceleratorState._reset_state()
    return str(refused.value)


@pytest.fixture(scope="module")
def alone(run_ranks):
    """What one process learns and says: without Megatron-LM, where there is such a model."""

    def plain():
        found = {"GPT2LMHeadModel": train()[0]}
        found |= {name: train(model=other(name))[0] for name, _ in OTHERS}
        model, prompts = speaker()
        greedy = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 8}
        found["greedy"] = model.generate(prompts, **greedy).tolist()
        found["shorter"] = model.generate(prompts[1:, :3], **(greedy | {"max_new_tokens": 6})).tolist()
        found["beams"] = model.generate(prompts[:1], **greedy, num_beams=4, length_penalty=1.5).tolist()
        from orc.runtime import AcceleratorState

        AcceleratorState._reset_state()
        found["variants"] = [variant(one) for one in VARIANTS]
        return found

    return run_ranks(1, plain, timeout=240)[0]


@pytest.fixture(scope="module")
def together(run_ranks, tmp_path_factory):
    """What each of two ranks learns and says."""
    place = str(tmp_path_factory.mktemp("saved"))
    documents = indexed(Path(place))

    def work():
        from orc.runtime import AcceleratorState, MegatronLMPlugin

        found = {"gpt": [trained_gpt(one) for one in GPT], "others": [], "place": place}
        for name, settings in OTHERS:
            rest = dict(settings)
            found["others"].append(train(rest.pop("micro"), MegatronLMPlugin(**rest), other(name))[0])
            AcceleratorState._reset_state()
        found["variants"] = [variant(one, tp_degree=2) for one in VARIANTS]
        across = {"pp_degree": 2, "num_micro_batches": 2}
        found["checkpoint"] = resumed(f"{place}/whole", {"micro": 4, "tp_degree": 2}, across, "no")
        shards = {"use_distributed_optimizer": True}
        found["half"] = resumed(f"{place}/half", {"micro": 2} | shards, shards, "bf16")
        found["combined"] = combined()
        found["apart"] = told_apart()
        found["documents"] = from_documents(documents)
        found["said"] = [generated(tp_degree=2), generated(pp_degree=2)]
        return found

    return run_ranks(2, work, timeout=400)


def check_parity(got, wanted):
    assert got["losses"] == pytest.approx(wanted["losses"], abs=3e-5)
    assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    assert got["weights"].keys() == wanted["weights"].keys()
    for name, one in wanted["weights"].items():
        assert (got["weights"][name] - one).abs().max() < 2e-3 * max(1, one.abs().max()), name


def test_two_ranks_share_layers_or_stages_and_train_like_one_process(together, alone):
    for found in together:
        for one in found["gpt"]:
            check_parity(one, alone["GPT2LMHeadModel"])
    first, second = (found["gpt"] for found in together)
    assert [one["main"] for one in first] == [(False, False)] * 5
    assert [one["main"] for one in second] == [(True, True)] * 5
    assert [one["batch"] for one in first] == [4] * 5
    assert [one["share"] for one in second] == [(0, 1)] * 4 + [(1, 2)]
    assert {one["kind"] for one in first} == {"MEGATRON_LM"}


def test_logits_of_all_copies_are_joined_on_request(together):
    import torch

    model = gpt2()
    found = [one["gpt"][-1] for one in together]
    model.load_state_dict(found[0]["weights"])
    for one in found:
        tokens, logits = one["logits"]
        assert len(tokens) == ROWS  # two of each copy
        with torch.no_grad():
            assert torch.allclose(logits, model(input_ids=tokens).logits, atol=1e-4)


def test_what_megatron_joins_cannot_be_trained_apart(together):
    first, second = (one["apart"] for one in together)
    assert first == second
    assert first.startswith("bert.encoder.layer.0.attention.self.query.weight, bert.encoder.layer.0.attention.self.key")


@pytest.mark.parametrize(("number", "name"), [(number, name) for number, (name, _) in enumerate(OTHERS)])
def test_models_with_an_encoder_train_like_one_process(together, alone, number, name):
    for found in together:
        check_parity(found["others"][number], alone[name])


def test_other_positions_and_one_head_of_keys_are_alike_on_two_ranks(together, alone):
    from torch.utils.data import default_collate
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for found in together:
        for one, wanted in zip(found["variants"], alone["variants"], strict=True):
            check_parity(one, wanted)
    losses = [one["losses"][-1] for one in (*alone["variants"], alone["GPT2LMHeadModel"])]
    assert all(abs(one - two) > 1e-4 for one, two in itertools.combinations(losses, 2))

    import torch

    from orc.runtime.engine.megatron.layers import slopes

    for heads in (4, 6):
        assert torch.allclose(slopes(heads), build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1])

    plain = gpt2().config
    shape = {"n_layer": plain.n_layer, "n_head": plain.n_head, "n_embd": plain.n_embd, "n_positions": 16}
    model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**shape, vocab_size=VOCABULARY, activation_function="gelu_new"))
    weights = alone["variants"][2]["weights"]
    model.load_state_dict({name: one.t() if ".c_" in name and one.ndim == 2 else one for name, one in weights.items()})
    batch = default_collate(samples()[-ROWS:])
    with torch.no_grad():
        assert float(model.eval()(**batch).loss) == pytest.approx(alone["variants"][2]["losses"][-1], abs=2e-5)


def test_a_checkpoint_is_that_of_a_transformers_model_and_loads_at_other_degrees(together):
    from safetensors.torch import load_file

    found = together[0]["checkpoint"]
    for one in together:
        assert one["checkpoint"]["after"] == pytest.approx(found["before"], abs=2e-5)
    model = gpt2()
    model.load_state_dict(load_file(f"{together[0]['place']}/whole/model.safetensors"), strict=False)
    assert all((one == found["weights"][name]).all() for name, one in model.named_parameters())


def test_a_run_in_16_bits_goes_on_as_if_it_had_not_stopped(together):
    import torch
    from safetensors.torch import load_file

    assert [one["half"]["after"] for one in together] == [one["half"]["before"] for one in together]
    state = load_file(f"{together[0]['place']}/half/model.safetensors")
    assert {one.dtype for one in state.values()} == {torch.float32}
    assert any((one != one.bfloat16().float()).any() for one in state.values())  # what the optimizer trains


def test_copies_read_different_samples_of_an_indexed_dataset(together):
    import torch
    from torch.nn.functional import cross_entropy

    first, second = (one["documents"] for one in together)
    assert first["loss"] == second["loss"]
    batches = [one["batch"] for one in (first, second)]
    tokens, labels = (torch.cat([one[name] for one in batches]) for name in ("input_ids", "labels"))
    assert tokens.shape == (4, 8)
    assert len(set(tokens.flatten().tolist())) == 32
    with torch.no_grad():
        logits = gpt2()(input_ids=tokens).logits
    assert first["loss"] == pytest.approx(float(cross_entropy(logits.flatten(0, 1), labels.flatten())), abs=2e-5)
    assert not set(first["valid"].flatten().tolist()) & set(tokens.flatten().tolist())
    assert (first["none"], first["consumed"], first["total"]) == (None, 4, 4)


def test_each_epoch_has_every_window_of_the_documents_once(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from orc.runtime.engine.megatron.indexed import IndexedLoader, Windows, split

    windows = Windows(IndexedDataset(indexed(tmp_path)), range(9), 8, seed=3)
    samples = [[windows[epoch * windows.per_epoch + one] for one in range(windows.per_epoch)] for epoch in range(2)]
    assert windows.per_epoch == (9 * 10 - 1) // 8
    for epoch in samples:
        tokens = [token for one in epoch for token in one["input_ids"].tolist()]
        assert len(set(tokens)) == len(tokens) == windows.per_epoch * 8
        assert all((one["input_ids"][1:] == one["labels"][:-1]).all() for one in epoch)
    assert samples[0][0]["input_ids"].tolist() != samples[1][0]["input_ids"].tolist()
    loader, other = IndexedLoader(windows, 2, place=1, copies=2), IndexedLoader(windows, 2, place=1, copies=2)
    next(loader)
    other.load_state_dict(loader.state_dict())
    assert (next(other)["labels"] == next(loader)["labels"]).all()
    assert split(20, "8,1,1") == [range(16), range(16, 18), range(18, 20)]
    with pytest.raises(ValueError, match="expected three numbers like 969,30,1"):
        split(20, "most")


def test_what_the_page_says_of_combinations_is_so(together, alone):
    section = PAGE.read_text().split("## What works together", 1)[1].split("\n## ", 1)[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    cells = dict(zip(lines[0][1:], next(one for one in lines if one[0] == "Megatron-LM")[1:], strict=True))
    notes = {number: text.split("`")[1] for number, text in re.findall(r"^(\d+)\. (.*)", section, re.MULTILINE)}
    assert cells.pop("DDP") == cells.pop("activation checkpointing") == "yes"  # trained above
    assert cells.pop("CPU offload") == "–"
    for found in (one["combined"] for one in together):
        assert found.keys() == cells.keys()
        for name, cell in cells.items():
            if cell == "yes":
                assert found[name] == pytest.approx(alone["GPT2LMHeadModel"]["losses"], abs=0.02), name
            else:
                assert notes[cell.removeprefix("no [").removesuffix("]")] in found[name], name


def test_a_gpt_on_several_ranks_says_what_one_of_transformers_says(together, alone):
    for by_tensors, by_stages in (one["said"] for one in together):
        assert by_tensors == by_stages | {"shared": by_tensors["shared"]}
        assert by_tensors["greedy"] == by_tensors["one"] == alone["greedy"]
        assert by_tensors["padded"][1][:9] == alone["shorter"][0]
        assert by_tensors["padded"][0] == alone["greedy"][0][:11]
        assert by_tensors["beams"] == alone["beams"]
        assert [one[0] for one in by_tensors["narrow"]] == [0, 0]
        for drawn in ("top_k", "top_p"):
            assert by_tensors[drawn] != by_tensors["greedy"]
            assert [one[:5] for one in by_tensors[drawn]] == [one[:5] for one in alone["greedy"]]
    assert together[0]["said"] == together[1]["said"]


def test_four_ranks_combine_tensor_pipeline_and_data_parallelism(run_ranks, alone):
    settings = [
        {"micro": 2, "tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2},
        {"micro": 1, "pp_degree": 2, "num_micro_batches": 2},
    ]
    ranks = run_ranks(4, lambda: [trained_gpt(one) for one in settings], timeout=240)
    for found in ranks:
        for one in found:
            check_parity(one, alone["GPT2LMHeadModel"])
    assert [found[0]["main"][0] for found in ranks] == [False, False, False, True]
    assert [found[1]["share"] for found in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]  # stages are farthest apart


def test_its_groups_have_the_time_out_that_was_asked_for_in_whole_minutes(run_ranks):
    def opened():
        import torch

        from orc.runtime import MegatronLMPlugin, PartialState
        from orc.runtime.engine.megatron.library import open_groups

        groups = open_groups(PartialState(cpu=True).ctx, MegatronLMPlugin(tp_degree=2), 1)
        backend = groups.get_tensor_model_parallel_group()._get_backend(torch.device("cpu"))
        return backend.options._timeout.total_seconds()

    assert run_ranks(2, opened, env={"ORC_TIMEOUT_S": "77"}) == [120, 120]
    assert run_ranks(2, opened) == [1800, 1800]
