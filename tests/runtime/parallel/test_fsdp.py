"""Sharded data parallelism on real ranks: what it computes, what each rank keeps, and what it refuses."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from orc.runtime import Accelerator, AcceleratorState, ParallelismConfig
from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin as Plugin

STEPS = 50


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x):
        return x + self.scale.to(x.dtype) * self.b(F.gelu(self.a(self.norm(x))))


class Language(nn.Module):
    """A language model whose head is its embedding, when *tied*."""

    def __init__(self, tied=True, size=16, words=23):
        super().__init__()
        self.emb = nn.Embedding(words, size)
        self.blocks = nn.ModuleList([Block(size), Block(size)])
        self.head = nn.Linear(size, words, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 23, (4, 7), generator=generator)


def loss_of(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def fresh():
    """No context of this process; a rank may train several ways, one after the other."""
    AcceleratorState._reset_state(reset_partial_state=False)


def trained(plugin, *, tied=True, steps=STEPS, clip=None, accumulate=1, together=True, **options):
    """Losses, norms and whole weights of a training; the Accelerator and its objects."""
    fresh()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulate, **options)
    model = Language(tied)
    optimizer = torch.optim.AdamW(
        [{"params": model.blocks.parameters(), "lr": 2e-2}, {"params": [*model.emb.parameters()]}], lr=1e-2
    )
    if not tied:
        optimizer.add_param_group({"params": model.head.parameters()})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    if together:
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    else:
        optimizer = accelerator.prepare(optimizer)
        model, schedule = accelerator.prepare(model, schedule)
    losses, norms = [], []
    for step in range(steps):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch(step, accelerator.process_index))
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, accelerator, model, optimizer


def held(model, optimizer):
    """Bytes of parameters, gradients and optimizer state on this rank."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in {id(p): p for p in model.parameters()}.values()]
    total = sum(2 * p.numel() * p.element_size() for p in local)  # a gradient is as large as its parameter
    for state in optimizer.state.values():
        for value in state.values():
            value = value.to_local() if hasattr(value, "to_local") else value
            total += value.numel() * value.element_size() if value.dim() else 0
    return total


def one_wrapped(**fields):
    return Plugin(auto_wrap_policy=1, transformer_cls_names_to_wrap="Block", use_orig_params=True, **fields)


def difference(mine, theirs):
    return max(abs(a - b) for a, b in zip(mine, theirs, strict=True))


def parity(kinds, **options):
    """Largest difference of losses and norms from DDP's, and the share of its memory, for plug-ins made of *kinds*."""
    losses, norms, _, model, optimizer = trained(None, **options)
    whole = held(model, optimizer)
    report = {}
    for name, fields in kinds.items():
        mine, my_norms, accelerator, model, optimizer = trained(one_wrapped(**fields), **options)
        assert accelerator.distributed_type == "FSDP"
        norm = difference(my_norms, norms) if norms else 0.0
        report[name] = (difference(mine, losses), norm, held(model, optimizer) / whole)
    return report


TWO = {"fsdp_version": 2}
ONE = {"fsdp_version": 1}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_losses_equal_those_of_replicas_and_each_rank_keeps_its_share(run_ranks, tied):
    kinds = (
        {"2": TWO, "1": ONE}
        if tied
        else {"2": {**TWO, "reshard_after_forward": False}, "1": {**ONE, "sharding_strategy": 2}}
    )
    for report in run_ranks(2, lambda: parity(kinds, tied=tied, clip=0.5)):
        for name, (loss, norm, share) in report.items():
            assert loss < 1e-5, (name, loss)
            assert norm < 1e-5, (name, norm)
            assert 0.45 < share < 0.6, (name, share)


def test_four_ranks_hold_a_quarter_or_with_hybrid_sharding_half_and_no_shard_keeps_all(run_ranks):
    kinds = {"2": TWO, "2 hybrid": {**TWO, "sharding_strategy": "HYBRID_SHARD"}, "1 hybrid": {"sharding_strategy": 4},
             "1 none": {"sharding_strategy": 3}}  # fmt: skip
    expected = {"2": 0.25, "2 hybrid": 0.5, "1 hybrid": 0.5, "1 none": 1.0}

    def ways():
        report = parity(kinds, steps=10)
        whole = trained(None, steps=10)
        sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        losses, _, _, model, optimizer = trained(one_wrapped(**TWO), steps=10, parallelism_config=sizes)
        share = held(model, optimizer) / held(whole[3], whole[4])
        return {**report, "2 by sizes": (difference(losses, whole[0]), 0.0, share)}

    expected["2 by sizes"] = 0.5
    for report in run_ranks(4, ways, nodes=2):
        assert report.keys() == expected.keys()
        for name, (loss, _, share) in report.items():
            assert loss < 1e-5, (name, loss)
            assert expected[name] - 0.03 < share < expected[name] + 0.08, (name, share)


def test_accumulated_gradients_travel_once_per_window_and_optimizers_may_come_first(run_ranks):
    def ways():
        options = {"steps": 12, "accumulate": 4, "clip": 0.3}
        expected = trained(None, **options)
        found = {}
        for name, fields in {"2": TWO, "1": ONE}.items():
            for together in (True, False):
                mine = trained(one_wrapped(**fields), together=together, **options)
                found[name, together] = max(difference(mine[0], expected[0]), difference(mine[1], expected[1]))
            plugin = one_wrapped(**fields)
            each = trained(plugin, gradient_accumulation_plugin=None, **options)
            found[name, "again"] = difference(each[0], expected[0])
        return found, len(expected[1])

    for found, windows in run_ranks(2, ways):
        assert windows == 3
        assert max(found.values()) < 1e-5, found


def test_a_model_that_only_rank_0_has_is_shared_with_its_ties_and_buffers(run_ranks):
    def loaded():
        found = {}
        for name, fields in {"2": TWO, "1": ONE}.items():
            fresh()
            plugin = one_wrapped(cpu_ram_efficient_loading=True, **fields)
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            torch.manual_seed(7)
            with contextlib.nullcontext() if accelerator.is_main_process else torch.device("meta"):
                model = Language()
            if accelerator.is_main_process:
                for buffer in model.buffers():
                    buffer.fill_(0.25)
            else:
                model.head.weight = nn.Parameter(torch.empty(23, 16, device="meta"))  # as loading on meta may leave it
            prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            losses = []
            for step in range(2):
                loss = loss_of(prepared, batch(step, 0))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            scales = [float(buffer) for buffer in prepared.buffers()]
            found[name] = losses, scales, len(optimizer.param_groups[0]["params"])
        # What replicas of rank 0's model compute.
        torch.manual_seed(7)
        model = Language()
        for buffer in model.buffers():
            buffer.fill_(0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = []
        for step in range(2):
            loss = loss_of(model, batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(float(loss))
        # No rank has values: rank 0 makes some.
        fresh()
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(**TWO))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        made = accelerator.prepare(model)
        full = {name: value.full_tensor() for name, value in made.state_dict().items()}
        same = accelerator.gather(torch.stack([value.abs().sum() for value in full.values()])[None])
        return found, expected, bool(torch.equal(same[0], same[1])), float(full["0.weight"].abs().sum())

    for found, expected, same, size in run_ranks(2, loaded):
        for losses, scales, _ in found.values():
            assert difference(losses, expected) < 1e-5
            assert scales == [0.25, 0.25]
        assert same
        assert 0 < size < 16


def test_bf16_trains_float32_shards_and_other_options_change_no_result(run_ranks):
    def variants():
        expected, *_ = trained(None, steps=6)
        found = {}
        for version in (ONE, TWO):
            for extra in ({"activation_checkpointing": True}, {"forward_prefetch": True}, {"cpu_offload": True}):
                losses, *_ = trained(one_wrapped(**version, **extra), steps=6)
                found[str((version, extra))] = difference(losses, expected)
            sized = Plugin(auto_wrap_policy=2, min_num_params=200, use_orig_params=True, **version)
            found[str(version)] = difference(trained(sized, steps=6)[0], expected)
        low = {}
        for version in (ONE, TWO):
            losses, _, _, model, optimizer = trained(one_wrapped(**version), steps=6, mixed_precision="bf16")
            output = model(batch(0, 0))
            states = {value.dtype for state in optimizer.state.values() for value in state.values() if value.dim()}
            low[str(version)] = (
                difference(losses, expected),
                output.dtype,
                {p.dtype for p in model.parameters()},
                states,
            )
        return found, low

    float32 = torch.float32
    for found, low in run_ranks(2, variants):
        assert max(found.values()) < 1e-5, found
        for loss, output, parameters, states in low.values():
            assert 0 < loss < 0.1
            assert (output, parameters, states) == (float32, {float32}, {float32})


def test_the_precision_of_parameters_follows_the_model_unless_it_is_mixed(run_ranks):
    def precisions():
        found = []
        for version in (ONE, TWO):
            for mixed in ("no", "bf16"):
                fresh()
                accelerator = Accelerator(cpu=True, fsdp_plugin=one_wrapped(**version), mixed_precision=mixed)
                model = Language().bfloat16()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
                accelerator.backward(loss_of(model, batch(0, accelerator.process_index)))
                optimizer.step()
                states = {value.dtype for state in optimizer.state.values() for value in state.values() if value.dim()}
                found.append(({p.dtype for p in model.parameters()}, states))
        return found

    low, full = ({torch.bfloat16},) * 2, ({torch.float32},) * 2
    assert run_ranks(2, precisions) == [[low, full, low, full]] * 2


def test_a_training_goes_on_from_its_shards_and_rank_0_has_the_whole_weights(run_ranks, tmp_path):
    def saved():
        found = {}
        for version in (ONE, TWO):
            plugin = one_wrapped(state_dict_type="SHARDED_STATE_DICT", **version)
            _, _, accelerator, model, optimizer = trained(plugin, steps=3)
            folder = tmp_path / str(plugin.fsdp_version)
            accelerator.save_state(folder)
            whole = accelerator.get_state_dict(model)
            shapes = {name: tuple(value.shape) for name, value in whole.items() if value.device.type == "cpu"}

            def steps(accelerator=accelerator, model=model, optimizer=optimizer):
                losses = []
                for step in range(3, 6):
                    loss = loss_of(model, batch(step, accelerator.process_index))
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(float(loss.detach()))
                return losses

            expected = steps()
            accelerator.load_state(folder)
            files = {one.name: sorted(f.name for f in one.iterdir()) for one in folder.iterdir() if one.is_dir()}
            found[plugin.fsdp_version] = difference(steps(), expected), files, shapes
        return found

    shapes = {name: tuple(value.shape) for name, value in Language().state_dict().items()}
    shards = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for rank, found in enumerate(run_ranks(2, saved)):
        for loss, files, mine in found.values():
            assert loss < 1e-6
            assert files == {"optimizer_0": shards, "pytorch_model_0": shards}
            assert mine == ({} if rank else shapes)


def test_a_pretrained_model_of_transformers_gets_the_values_of_rank_0(run_ranks, tmp_path):
    def trained_twice(model, optimizer, backward):
        losses = []
        for step in range(2):
            loss = F.cross_entropy(model(input_ids=batch(step, 0)).logits, torch.arange(4))
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def loaded():
        from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

        # A head that is not in the file, and buffers that are in none.
        size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 23}
        config = LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=1, num_labels=4, pad_token_id=22)
        config.tie_word_embeddings = True
        found = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_FSDP", "true")
            patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
            patch.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
            for version in "12":
                patch.setenv("FSDP_VERSION", version)
                fresh()
                accelerator = Accelerator(cpu=True)
                if accelerator.is_main_process:
                    torch.manual_seed(3)
                    LlamaForCausalLM(config).save_pretrained(tmp_path)
                accelerator.wait_for_everyone()
                torch.manual_seed(accelerator.process_index)
                if version == "1" or accelerator.is_main_process:
                    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
                else:
                    with torch.device("meta"):
                        model = AutoModelForSequenceClassification.from_config(config)
                whole = {name: value.clone() for name, value in model.state_dict().items()}
                model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
                found[version] = trained_twice(model, optimizer, accelerator.backward), whole
        if not accelerator.is_main_process:
            return [losses for losses, _ in found.values()], None
        expected = []
        for _, whole in found.values():
            model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
            model.load_state_dict(whole)
            expected.append(trained_twice(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.Tensor.backward))
        return [losses for losses, _ in found.values()], expected

    (first, expected), (second, _) = run_ranks(2, loaded)
    assert first == second
    for losses, wanted in zip(first, expected, strict=True):
        assert losses == pytest.approx(wanted, abs=1e-5)


def test_models_for_evaluation_sharded_ones_and_small_ones(run_ranks):
    def models():
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        fresh()
        accelerator = Accelerator(cpu=True, fsdp_plugin=one_wrapped(**TWO))
        small, optimizer = nn.Linear(1, 1), None
        optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
        own = fully_shard(nn.Linear(4, 4))
        teacher = accelerator.prepare_model(Language(), evaluation_mode=True)
        first, second = Language(), Language()
        found = {
            "evaluation": any(hasattr(one, "full_tensor") for one in teacher.parameters()),
            "own": accelerator.prepare(own) is own,
            "empty": type(accelerator.prepare(nn.ReLU())),
            "several": [
                one is other for one, other in zip(accelerator.prepare(first, second), (first, second), strict=True)
            ],
            "unwrapped": accelerator.unwrap_model(first) is first,
        }
        plugin = accelerator.state.fsdp_plugin
        plugin.auto_wrap_policy, plugin._wrapping = None, "NO_WRAP"
        small, optimizer = accelerator.prepare(small, optimizer)
        loss = small(torch.ones(2, 1)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        found["small"] = float(small(torch.ones(2, 1)).square().mean()) < float(loss)
        fresh()
        accelerator = Accelerator(cpu=True, fsdp_plugin=one_wrapped())
        plain = Language()
        wrapped = accelerator.prepare(plain)
        found["one"] = isinstance(wrapped, FullyShardedDataParallel), accelerator.unwrap_model(wrapped) is plain
        found["left"] = accelerator.prepare(wrapped) is wrapped
        return found

    for found in run_ranks(2, models):
        assert found == {
            "evaluation": False, "own": True, "empty": nn.ReLU, "several": [True, True], "unwrapped": True,
            "small": True, "one": (True, True), "left": True,
        }  # fmt: skip


def test_what_cannot_be_sharded_is_one_error_on_every_rank(run_ranks):
    def errors():
        found = []

        def refused(plugin, model, *more, make=lambda model: None):
            fresh()
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            model = model(accelerator.process_index)
            optimizer = make(model)
            try:
                accelerator.prepare(*(one for one in (model, optimizer) if one is not None))
            except (ValueError, RuntimeError) as error:
                found.append(str(error))

        refused(one_wrapped(**TWO), lambda rank: nn.Sequential(nn.Linear(4, 4)))
        for version in (ONE, TWO):
            refused(Plugin(**version), lambda rank: nn.Linear(4, 4 + rank))
        with torch.device("meta"):
            bare = type("Bare", (nn.Module,), {})()
            bare.weight = nn.Parameter(torch.empty(3))
        refused(Plugin(**TWO), lambda rank: bare)

        def two_groups(model):
            return torch.optim.SGD([{"params": [one], "lr": 0.1} for one in model.parameters()])

        refused(Plugin(), lambda rank: nn.Linear(4, 4), make=two_groups)

        def stepped(model):
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            return optimizer

        refused(Plugin(use_orig_params=True), lambda rank: nn.Linear(4, 4), make=stepped)
        with torch.device("meta"):
            refused(Plugin(param_init_fn=lambda module: module.nothing, **TWO), lambda rank: nn.Linear(4, 4))
        return found

    for found in run_ranks(2, errors):
        assert len(found) == 7, found
        assert "rank 0: AttributeError: 'Linear' object has no attribute 'nothing'" in found[6]
        assert "no module of class 'Block' to wrap: the model has Linear, Sequential" in found[0]
        assert "the model of rank 1 is not that of rank 0: weight is torch.float32 [5, 4] instead" in found[1]
        assert found[2] == found[1]
        assert "rank 0: Bare has parameters or buffers without values" in found[3]
        assert "set use_orig_params=True, or make the optimizer after prepare" in found[4]
        assert "the optimizer has state already" in found[5]


def test_an_overflow_in_one_ranks_part_makes_all_skip_the_step_and_evaluation_and_values_work(run_ranks):
    def overflow():
        found = []
        for version in (ONE, TWO):
            _, _, accelerator, model, optimizer = trained(one_wrapped(**version), steps=1, mixed_precision="fp16")
            accelerator.backward(loss_of(model, batch(0, accelerator.process_index)))
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            local = [one.to_local() if hasattr(one, "to_local") else one for one in gradients]
            if accelerator.process_index == 1:
                next(one for one in local if one.numel()).view(-1)[0] = float("inf")
            optimizer.step()
            skipped = accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                finite = bool(loss_of(model, batch(0, 0)).isfinite())
            model.train()
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, batch(0, accelerator.process_index)))
                late = loss_of(model, batch(1, accelerator.process_index))
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(late)
            accelerator.clip_grad_value_(model.parameters(), 1e-3)
            largest = max(float(one.grad.abs().max()) for one in model.parameters() if one.grad is not None)
            found.append((skipped, finite, 0 < largest < 1.1e-3))
        return found

    assert run_ranks(2, overflow) == [[(True, True, True)] * 2] * 2
