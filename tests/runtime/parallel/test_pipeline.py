"""`prepare_pippy`: a model in stages, one on each process, computes what the whole model does."""

import pytest
import torch
from torch import nn

from orc.runtime.parallel.stages import automatic_map


class Block(nn.Module):
    """A block with a residual connection, whose inner activation is not contiguous."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.relu, self.drop = nn.ReLU(), nn.Dropout(0.5)

    def forward(self, x):
        hidden = self.up(self.norm(x)).transpose(1, 2)
        return x + self.drop(self.down(self.relu(hidden).transpose(1, 2)))


class Net(nn.Module):
    """Some words, a mask for all rows, a choice; outputs come from several places."""

    _no_split_modules = ("Block",)

    def __init__(self, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, words, mask=None, scaled=False, weights=None):
        first = x = self.embed(words)
        for block in self.blocks:
            x = block(x)
            if mask is not None:
                x = x * mask
        logits = self.head(x + first)
        if weights is not None:
            logits = logits * weights[:, None, None]
        return {"logits": logits * self.scale if scaled else logits, "first": (first, None), "words": words}


def same(output, expected):
    torch.testing.assert_close(output["logits"], expected["logits"])
    torch.testing.assert_close(output["first"][0], expected["first"][0])
    assert torch.equal(output["words"], expected["words"])
    assert output["first"][1] is None
    return len(output["logits"])


def run_stages():
    from orc.runtime import PartialState, prepare_pippy

    state = PartialState()
    last = state.is_last_process
    words = torch.arange(35).view(7, 5) % 16
    mask, weights = torch.linspace(0, 1, 8).expand(5, 8), torch.linspace(1, 2, 7)
    whole = Net().eval()
    seen = {}

    # Cut by the device map; the output is on the last process; every size of batch, in whole micro-batches or not.
    model = Net()
    kept = prepare_pippy(model, example_args=(words[:4],))
    assert kept is model
    assert not model.training
    seen["points"] = model.hf_split_points
    with torch.no_grad():
        for rows in (4, 1, 2, 5, 7):
            output = model(words[:rows])
            assert (output is None) is not last
            if last:
                assert same(output, whole(words[:rows])) == rows
                assert not output["logits"].requires_grad

    # Named points, everything in one micro-batch, outputs everywhere, inputs by name and shared by all rows.
    model = prepare_pippy(
        Net(),
        ["blocks.1.relu"],
        example_args=(words[:4],),
        example_kwargs={"mask": mask, "scaled": True, "weights": weights[:4]},
        num_chunks=1,
        gather_output=True,
    )
    assert model.hf_split_points == ["blocks.1.relu"]
    with torch.no_grad():
        for rows in (4, 7, 3):
            given = {"words": words[:rows], "mask": mask, "weights": weights[:rows], "scaled": True}
            assert same(model(**given), whole(**given)) == rows
        # The inputs of the first process count.
        here = words[:2] if state.is_main_process else words[5:6]
        output = model(here, mask, True, weights[:2])
        assert same(output, whole(words[:2], mask, True, weights[:2])) == 2

    # What cannot be is an error on every process, also where another process has failed.
    class Logits(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(99, 1))

        def forward(self, words):
            logits = super().forward(words)["logits"]
            # A value of zero, as a stage that has failed sends it, is out of range in the next one.
            return logits + self.steps.gather(0, words.reshape(-1, 1) - 1).view(*words.shape, 1)

    class Total(Net):
        def forward(self, words):
            return super().forward(words)["logits"].sum()

    def fails(name, function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"

    example = {"example_args": (words[:4],)}
    fails("unknown", prepare_pippy, Net(), ["blocks.9"], **example)
    fails("twice", prepare_pippy, Net(3), ["head", "head"], **example)
    fails("too many", prepare_pippy, Net(), ["blocks.1", "head"], **example)
    fails("not called", prepare_pippy, Net(), ["blocks"], **example)
    fails("one layer", prepare_pippy, nn.Linear(5, 5), example_args=(torch.ones(4, 5),))
    fails("no name", prepare_pippy, Net(), "balanced", **example)
    fails("no chunks", prepare_pippy, Net(), num_chunks=0, **example)
    fails("no example", prepare_pippy, Net())
    fails("no rows", prepare_pippy, Net(), example_args=(3,))
    fails("no batch", prepare_pippy, Total(), **example)
    fails("prepared", prepare_pippy, model, **example)
    fails("no weights", prepare_pippy, Net().to("meta"), **example)
    fails("on one", prepare_pippy, Net(), ["heat"] if last else "auto", **example)
    fails("unlike", prepare_pippy, Net(), ["head"] if last else "auto", **example)
    fails("shape", model, words[:, :3], mask, True, weights)
    fails("rows", model, words, mask, True, weights[:3])
    fails("dimensions", model, words, mask, True, weights[0])
    fails("no tensor", model, 3, mask, True, weights)
    fails("empty", model, words[:0], mask, True, weights[:0])
    fails("constant", model, words, mask, 2, weights)
    fails("inputs", model, words)
    failing = prepare_pippy(Logits(), ["head"], example_args=(words[:4] + 1,))
    fails("first stage", failing, words + 99)
    failing.head.weight = failing.embed.weight = None  # the stages keep theirs
    output = failing(words.clamp(min=1))  # and it goes on
    if last:
        torch.testing.assert_close(output, whole(words.clamp(min=1))["logits"])
    return seen


FAILURES = {
    "unknown": "ValueError: split_points: the model has no module 'blocks.9', did you mean 'blocks.3'?",
    "twice": "ValueError: split_points: a module is named twice",
    "too many": "ValueError: split_points names 2 modules, which makes 3 stages, but there are 2 processes",
    "not called": "ValueError: split_points: 'blocks' is not called",
    "one layer": "ValueError: split_points='auto' makes 1 stages, but there are 2 processes",
    "no name": "ValueError: split_points is 'auto' or a list of names of modules, not 'balanced'",
    "no chunks": "ValueError: num_chunks is 0",
    "no example": "ValueError: example_args: give the inputs of one batch",
    "no rows": "ValueError: example_args: give at least one tensor",
    "no batch": "ValueError: the output has shape (): its first dimension is not the batch",
    "no weights": "ValueError: prepare_pippy: embed.weight is on the meta device",
    "prepared": "ContextError: prepare_pippy: this model is a pipeline already",
}
FAILURES_OF_ONE = {
    "shape": "ValueError: words is (7, 3) of torch.int64, but the example has (4, 5) of torch.int64",
    "rows": "ValueError: weights is (3,) of torch.float32",
    "dimensions": "ValueError: weights is () of torch.float32, but the example has (4,)",
    "no tensor": "ValueError: words is 3, but the example has (4, 5) of torch.int64",
    "empty": "ValueError: words is (0, 5)",
    "constant": "ValueError: scaled is True in the example, which fixes it; it cannot be 2",
    "inputs": "ValueError: the pipeline was made for the inputs words, mask, scaled, weights, not for words",
    "first stage": "IndexError: index out of range",
}


def test_stages_on_two_processes_compute_what_the_model_does(run_ranks):
    first, last = run_ranks(2, run_stages, env={"ORC_USE_CPU": "1"})
    assert first.pop("points") == last.pop("points") == ["blocks.2"]
    for name, message in FAILURES.items():
        assert first.pop(name) == last[name]
        assert last.pop(name).startswith(message)
    assert last.pop("on one").startswith(
        "ValueError: split_points: the model has no module 'heat', did you mean 'head'?"
    )
    assert first.pop("on one").startswith(
        "OrcRuntimeError: prepare_pippy failed on process 1: ValueError: split_points"
    )
    assert first.pop("unlike") == last["unlike"]
    assert last.pop("unlike").startswith("ValueError: prepare_pippy: process 1 splits another model")
    for name, message in FAILURES_OF_ONE.items():
        assert first.pop(name).startswith(message)
        assert f" failed on process 0: {message}" in last.pop(name)
    assert not first
    assert not last


class Crossing(nn.Module):
    """Two values of one shape that a stage takes in one order, and a later stage in the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.two, self.three = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        a, b = self.one(x), self.other(x)
        y = self.two(a) * b
        return {"y": self.three(y) - b / 2 + a, "cache": Crossing}


def run_crossing():
    from orc.runtime import PartialState, prepare_pippy

    state = PartialState()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    with pytest.warns(UserWarning, match=r"the output\['cache'\] is a type: a pipeline returns None"):
        model = prepare_pippy(Crossing(), ["two", "three"], example_args=(x,), gather_output=True)
    output = model(x)
    torch.testing.assert_close(output["y"], Crossing()(x)["y"].detach())
    # The last stage fails: everybody hears of it.
    if state.is_last_process:
        model.three.bias.data = torch.zeros(3)
    with pytest.raises(RuntimeError) as caught:
        model(x)
    return output["cache"], str(caught.value)


def test_values_cross_from_stage_to_stage_in_any_order(run_ranks):
    for rank, (cache, message) in enumerate(run_ranks(3, run_crossing, env={"ORC_USE_CPU": "1"})):
        assert cache is None
        assert message.startswith("a stage of a pipeline failed on process 2: RuntimeError") or rank == 2


def test_a_single_process_runs_the_model_without_gradients():
    from orc.runtime.inference import prepare_pippy

    model = prepare_pippy(Net(), ["blocks.1"], example_args=(torch.zeros(2, 5, dtype=torch.long),))
    output = model(torch.ones(3, 5, dtype=torch.long))
    same(output, Net().eval()(torch.ones(3, 5, dtype=torch.long)))
    assert not output["logits"].requires_grad
    assert model.hf_split_points == []


@pytest.mark.parametrize(
    ("stages", "begins"),
    [(2, ["blocks.2"]), (3, ["blocks.1", "blocks.3"]), (4, ["blocks.1", "blocks.2", "blocks.3"])],
)
def test_the_device_map_of_a_pipeline_is_even(stages, begins):
    found = automatic_map(Net(), stages, None)
    assert [next(name for name, stage in found.items() if stage == index) for index in range(1, stages)] == begins
