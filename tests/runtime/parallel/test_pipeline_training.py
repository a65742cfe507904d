"""Pipelines that train: stages on several processes learn what one process learns."""

import copy

import pytest
import torch
from torch import nn

from orc.runtime import PipelineParallelConfig
from orc.runtime.core.config import ConfigError


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """The first and the last layer share their weights, and the last one needs what the first has made."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, words):
        first = x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x) + first) * self.scale


def mean_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def sum_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def batches(count=4, rows=8):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, 16, (2, rows, 5), generator=generator) for _ in range(count)]
    made[-1] = made[-1][:, : rows - 3]  # the last one is smaller, and no whole number of micro-batches
    return [(words, target) for words, target in made]


def learned_alone(data, *, window=1, loss=mean_loss, seed=0):
    """Losses, norms and weights of one process without any of this."""
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses, norms = [], []
    for number, (words, target) in enumerate(data, 1):
        value = loss(model(words), target)
        (value / window).backward()
        losses.append(value.item())
        if number % window == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, norms, model


def learned(accelerator, data, *, seed=0, again=None):
    """The same of a pipeline, in the ordinary loop; and what was prepared."""
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if again is not None:
        accelerator.load_state(again)
    losses, norms = [], []
    for words, target in data:
        with accelerator.accumulate(model):
            loss = model(words, target=target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms, model


def accelerator_for(pp, *, shard=1, replicate=1, window=1, precision=None, **options):
    from orc.runtime import Accelerator, AcceleratorState, FullyShardedDataParallelPlugin, ParallelismConfig

    AcceleratorState._reset_state()
    settings = {"loss_fn": mean_loss, "example_args": (batches()[0][0],), "num_microbatches": 4, **options}
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=window,
        step_scheduler_with_optimizer=shard == 1,  # else once for each share of the data
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if shard > 1 else None,
        parallelism_config=ParallelismConfig(
            pp_size=pp, dp_shard_size=shard, dp_replicate_size=replicate, pp_handler=PipelineParallelConfig(**settings)
        ),
    )


def same_weights(accelerator, model, expected):
    state = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return
    assert list(state) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_two_stages_learn_what_one_process_learns(run_ranks, tmp_path):
    def run():
        data = batches()
        losses, norms, alone = learned_alone(data)
        accelerator = accelerator_for(2)
        found = learned(accelerator, data)
        model = found[2]
        assert found[0] == pytest.approx(losses, rel=1e-4)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        same_weights(accelerator, model, alone)
        inside = accelerator.unwrap_model(model)
        assert isinstance(inside, Net)
        own = {name.partition(".")[0] + name.partition(".")[2][:2] for name, _ in inside.named_parameters()}

        # Evaluation: the output on every process, or the loss.
        model.eval()
        words, target = data[-1]
        torch.testing.assert_close(model(words), alone(words), rtol=1e-4, atol=1e-4)
        loss = model(words, target=target)
        assert loss.item() == pytest.approx(mean_loss(alone(words), target).item(), rel=1e-4)
        assert not loss.requires_grad
        model.train()

        # What fails on one process is an error on all, and then it goes on.
        seen = {}

        def fails(name, function, *args, **kwargs):
            try:
                function(*args, **kwargs)
            except Exception as error:
                seen[name] = f"{type(error).__name__}: {error}"

        config = model.config_of_pipeline
        fails("no target", model, words)
        fails("shape", model, words[:, :3], target=target)
        fails("large", model, torch.cat([words, words]), target=target)
        fails("stage", model, words + 99, target=target)
        fails("target", model, words, target=target + 99)
        config.loss_fn = lambda output, target: output
        fails("no scalar", model, words, target=target)
        config.loss_fn = lambda output, target: (output * 0).sqrt().sum()
        with torch.autograd.set_detect_anomaly(True):
            fails("backward", model, words, target=target)
        config.loss_fn = mean_loss
        assert model(words, target=target).item() == pytest.approx(loss.item(), rel=1e-4)
        accelerator.save_state(tmp_path / "two")
        accelerator.save_model(model, tmp_path / "weights")

        # A schedule that breaks off: neighbours, whose time is up, say where it began.
        def broken(*args, **kwargs):
            if accelerator.process_index == 1:
                raise MemoryError("no memory")
            accelerator.ctx.store.get("pipeline/broken/by")
            raise RuntimeError("Timed out waiting for send operation to complete")

        model.runner._schedules[True].step = broken
        fails("schedule", model, words, target=target)
        return own, seen

    first, last = run_ranks(2, run, env={"ORC_USE_CPU": "1"}, timeout=240)
    assert first[0] == {"embedwe", "blocks0.", "blocks1."}
    assert last[0] == {"blocks2.", "blocks3.", "embedwe"}  # what is shared lies on both
    assert "needs the target" in first[1]["no target"]
    assert "the example has" in first[1]["shape"]
    assert "larger than the example" in first[1]["large"]
    assert first[1]["stage"].startswith("IndexError")
    assert "failed on process 0: IndexError" in last[1]["stage"]
    assert last[1]["target"].startswith("IndexError")
    assert "failed on process 1: IndexError" in first[1]["target"]
    assert "one element" in first[1]["no scalar"]
    assert "nan values" in last[1]["backward"]
    assert "failed on process 1: RuntimeError" in first[1]["backward"]
    assert first[1]["schedule"] == last[1]["schedule"]
    assert "broke off on process 1 (MemoryError: no memory). It cannot go on" in last[1]["schedule"]
    assert (tmp_path / "weights" / "model.safetensors").is_file()

    # One process goes on where two have stopped, and four, with shards, where one has.
    def alone():
        accelerator = accelerator_for(1)
        more = learned(accelerator, batches(), again=tmp_path / "two", seed=5)
        accelerator.save_state(tmp_path / "one")
        return more[:2]

    def both():
        return learned(accelerator_for(2, window=1), batches(), again=tmp_path / "two", seed=5)[:2]

    (expected,) = run_ranks(1, alone, env={"ORC_USE_CPU": "1"}, timeout=120)
    for found in run_ranks(2, both, env={"ORC_USE_CPU": "1"}, timeout=120):
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)

    def four():
        accelerator = accelerator_for(2, shard=2)
        found = learned(accelerator, batches(), again=tmp_path / "two", seed=5)
        assert all(hasattr(one, "full_tensor") for one in found[2].parameters())
        accelerator.save_state(tmp_path / "four")
        return found[:2]

    for found in run_ranks(4, four, env={"ORC_USE_CPU": "1"}, timeout=240):  # the same batches on both shards
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)
    from safetensors.torch import load_file

    one, other = load_file(tmp_path / "one" / "model.safetensors"), load_file(tmp_path / "four" / "model.safetensors")
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_schedules_and_replicas_learn_the_same(run_ranks):
    def run():
        data = batches()
        # Several stages on each process, and gradients of two batches.
        losses, norms, alone = learned_alone(data, window=2)
        accelerator = accelerator_for(2, window=2, schedule="interleaved_1f1b", activation_checkpointing=True)
        found = learned(accelerator, data)
        assert found[0] == pytest.approx(losses, rel=1e-4)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        same_weights(accelerator, found[2], alone)
        found[2].eval()
        torch.testing.assert_close(found[2](data[-1][0]), alone(data[-1][0]), rtol=1e-4, atol=1e-4)

        from orc.runtime.parallel.norms import total_norm

        # Sums, divided by the number of rows; stages that the script names.
        accelerator = accelerator_for(2, schedule="gpipe", loss_fn=sum_loss, loss_reduction="sum", num_microbatches=2,
                                      split_points=["blocks.1"])  # fmt: skip
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        words, target = data[-1]
        loss = model(words, target=target)
        accelerator.backward(loss, normalize_by=target.numel())
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        alone = Net()
        expected = mean_loss(alone(words), target)
        expected.backward()
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item(), rel=1e-4)
        assert loss.item() == pytest.approx(expected.item() * target.numel(), rel=1e-4)
        # Who watches the gradients on one process sees those of all stages.
        assert float(total_norm(model.parameters(), 2.0)) == pytest.approx(min(norm, 1.0), rel=1e-3)

        # bfloat16, with its loss in float32.
        accelerator = accelerator_for(2, precision="bf16")
        found = learned(accelerator, data[:2])
        assert found[0] == pytest.approx(learned_alone(data[:2])[0], rel=0.02)
        return True

    assert run_ranks(2, run, env={"ORC_USE_CPU": "1"}, timeout=240) == [True, True]


class Detached(Net):
    """The first stage does not send the gradients of what it shares with the last one."""

    def forward(self, words):
        x = self.embed(words).detach()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_shared_weights_need_no_gradients_on_all_stages(run_ranks):
    def run():
        words, target = batches()[0]
        alone = Detached()
        mean_loss(alone(words), target).backward()
        model = accelerator_for(2).prepare(Detached())
        model(words, target=target).backward()
        torch.testing.assert_close(model.embed.weight.grad, alone.embed.weight.grad, rtol=1e-4, atol=1e-5)

    run_ranks(2, run, env={"ORC_USE_CPU": "1"}, timeout=60)


def test_two_copies_of_two_stages_learn_from_all_batches(run_ranks):
    def run():
        generator = torch.Generator().manual_seed(1)
        samples = torch.randint(0, 16, (16, 2, 5), generator=generator)
        accelerator = accelerator_for(2, replicate=2, example_args=(samples[:4, 0],))
        with pytest.raises((ValueError, RuntimeError), match=r"is on the meta device"):  # on one process alone
            accelerator.prepare(Net().to("meta" if accelerator.process_index == 3 else "cpu"))
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loader = torch.utils.data.DataLoader(samples, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        norms = []
        for batch in loader:
            loss = model(batch[:, 0], target=batch[:, 1])
            accelerator.backward(loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        _, expected, alone = learned_alone([(samples[:8, 0], samples[:8, 1]), (samples[8:, 0], samples[8:, 1])])
        assert norms == pytest.approx(expected, rel=1e-4)
        same_weights(accelerator, model, alone)
        model.eval()
        with torch.no_grad():
            outputs = [accelerator.gather_for_metrics(model(batch[:, 0])) for batch in loader]
        torch.testing.assert_close(torch.cat(outputs), alone(samples[:, 0]), rtol=1e-4, atol=1e-4)

        # One of two copies fails: all stop.
        model.train()
        wrong = batch[:, 1] + 99 * (accelerator.process_index == 3)
        try:
            model(batch[:, 0], target=wrong)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    *others, failing = run_ranks(4, run, env={"ORC_USE_CPU": "1"}, timeout=240)
    assert failing.startswith("IndexError")
    for text in others:
        assert "failed on process 3: IndexError" in text


def test_a_model_of_transformers_learns_in_stages(run_ranks):
    def run():
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=16,
            use_cache=False,
        )  # fmt: skip
        words, target = batches()[0]
        mask = torch.ones_like(words)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        torch.manual_seed(0)
        alone = AutoModelForCausalLM.from_config(config)
        accelerator = accelerator_for(
            3,
            loss_fn=lambda output, target: mean_loss(output.logits, target),
            example_kwargs={"attention_mask": mask},
            split_points=["model.layers.1", "model.layers.2"],
        )
        model = accelerator.prepare(model)
        # Mask and positions are made in the first stage, and used in all.
        loss = model(words, attention_mask=mask, target=target)
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        expected = mean_loss(alone(words, attention_mask=mask).logits, target)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item(), rel=1e-4)
        assert model.config is not None
        return True

    assert run_ranks(3, run, env={"ORC_USE_CPU": "1"}, timeout=240) == [True, True, True]


def test_what_a_pipeline_cannot_do_is_refused_on_every_process(run_ranks):
    def run():
        from orc.runtime import Accelerator, AcceleratorState, ParallelismConfig

        last = PipelineParallelConfig(loss_fn=mean_loss)  # the example is missing
        seen = {}

        def fails(name, make):
            try:
                made = make()
                model = Net()
                made.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            except Exception as error:
                seen[name] = str(error)

        def plain(handler, **options):
            AcceleratorState._reset_state()
            parallelism = ParallelismConfig(pp_size=2, pp_handler=handler)
            return Accelerator(cpu=True, parallelism_config=parallelism, **options)

        words = batches()[0][0]
        fails("no handler", lambda: plain(None))
        fails("no example", lambda: plain(last))
        fails("rows", lambda: accelerator_for(2, num_microbatches=3))
        fails("few", lambda: accelerator_for(2, num_microbatches=1))
        fails("point", lambda: accelerator_for(2, split_points=["block.1"]))
        fails("fp16", lambda: accelerator_for(2, precision="fp16"))
        ready = PipelineParallelConfig(loss_fn=mean_loss, example_args=(words,))
        fails("compiled", lambda: plain(ready, dynamo_backend="eager"))

        def early():  # the parameters of a layer that has another in its place
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model.blocks[1] = copy.deepcopy(model.blocks[1])
            accelerator = accelerator_for(2)
            accelerator.prepare(model, optimizer)

        fails("early", early)
        # An optimizer of one stage alone has no place in a checkpoint.
        accelerator = accelerator_for(2)
        model = accelerator.prepare(Net())
        fails("again", lambda: accelerator.prepare(accelerator.unwrap_model(model)) and accelerator)
        with pytest.raises(ValueError, match="before prepare"):
            accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
        return seen

    seen, other = run_ranks(2, run, env={"ORC_USE_CPU": "1"}, timeout=240)
    assert seen == other
    assert "needs pp_handler=PipelineParallelConfig(" in seen["no handler"]
    assert "example_args" in seen["no example"]
    assert "3 micro-batches do not divide" in seen["rows"]
    assert "at least as many micro-batches as there are stages, 2" in seen["few"]
    assert "did you mean 'blocks.1'?" in seen["point"]
    assert "use bf16" in seen["fp16"]
    assert "torch.compile" in seen["compiled"]
    assert "SGD steps parameters of a model that is spread" in seen["early"]


@pytest.mark.parametrize(
    ("sizes", "precision", "message"),
    [
        ({"pp": 2, "tp": 2}, "no", "tp cannot be combined with pp"),
        ({"pp": 2, "cp": 2}, "no", "cp cannot be combined with pp"),
        ({"pp": 2, "sp": 2}, "no", "sp cannot be combined with pp"),
        ({"pp": 4}, "fp8", "layers that compute in fp8 cannot be traced into stages"),
        ({"pp": 4}, "fp16", "fp16 scales losses"),
        ({"pp": 2, "dp_shard": 2}, "bf16", None),
    ],
)
def test_layouts_and_precisions_that_do_not_go_together_are_told(sizes, precision, message):
    from orc.runtime.parallel.pp import PARALLELIZER
    from orc.runtime.testing import fake_context

    context = fake_context(0, 4)
    context.configure({"mixed_precision": precision})
    context.set_topology(sizes, by="the test")
    told = PARALLELIZER.requires(context)
    assert told is None if message is None else message in str(told)


def test_a_stage_is_one_unit_of_shards():
    from orc.runtime import FullyShardedDataParallelPlugin
    from orc.runtime.parallel.sharding import choose_units

    model = Net()
    model.one_unit = "a stage of a pipeline"
    assert choose_units(model, FullyShardedDataParallelPlugin(fsdp_version=2), []) == [model]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    with pytest.raises(ValueError, match="a stage of a pipeline, which is one unit"):
        choose_units(model, plugin, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs loss_fn"),
        ({"loss_fn": mean_loss, "schedule": "1f1"}, "did you mean '1f1b'"),
        ({"loss_fn": mean_loss, "stages_per_process": 2}, "interleaved_1f1b has several"),
        ({"loss_fn": mean_loss, "num_microbatches": 0}, "num_microbatches=0"),
    ],
)
def test_options_that_cannot_be_are_refused_where_they_are_given(options, message):
    with pytest.raises(ConfigError, match=message):
        PipelineParallelConfig(**options)
