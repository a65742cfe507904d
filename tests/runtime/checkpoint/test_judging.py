"""What is judged by names, shapes and types, what decides for itself, and how that is put back."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.state.fit import decides_itself, load_tentatively, position_problem, problem
from orc.runtime.parallel.records import described


class OwnLoad(nn.Linear):
    def load_state_dict(self, *arguments, **options):
        return super().load_state_dict(*arguments, **options)


class OwnParts(nn.Linear):
    def _load_from_state_dict(self, *arguments):
        return super()._load_from_state_dict(*arguments)


class OwnState(nn.Linear):
    def state_dict(self, *arguments, **options):
        return super().state_dict(*arguments, **options)


class OwnSave(nn.Linear):
    def _save_to_state_dict(self, *arguments):
        return super()._save_to_state_dict(*arguments)


class OptimizerLoads(torch.optim.SGD):
    def load_state_dict(self, state):
        super().load_state_dict(state)


class OptimizerSaves(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict()


class Foreign(torch.optim.Optimizer):
    """An optimizer that is not torch's, with torch's way of loading."""

    def __init__(self, parameters):
        super().__init__(parameters, {})


def sgd(model=None, kind=torch.optim.SGD, **options):
    return kind((model or nn.Linear(2, 3)).parameters(), **{"lr": 0.1} | options)


def hooked(register):
    model = nn.Sequential(nn.Linear(2, 2))
    getattr(model[0], register)(lambda *arguments: None)
    return model


@pytest.mark.parametrize("kind", [OwnLoad, OwnParts, OwnState, OwnSave])
def test_a_model_with_a_part_that_loads_or_saves_its_own_way_decides_itself(kind):
    assert decides_itself(nn.Sequential(nn.Linear(2, 2), kind(2, 2)))
    assert not decides_itself(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert problem(kind(2, 2), {"nothing": "that fits"}) is None


@pytest.mark.parametrize(
    "register",
    ["register_load_state_dict_pre_hook", "register_load_state_dict_post_hook", "register_state_dict_post_hook"],
)
def test_a_model_with_hooks_decides_itself(register):
    if not hasattr(nn.Module, register):
        register = "_" + register.replace("_post", "")
    assert decides_itself(hooked(register))


def test_an_optimizer_with_its_own_ways_decides_itself():
    assert not decides_itself(sgd())
    assert decides_itself(sgd(kind=OptimizerLoads))
    assert decides_itself(sgd(kind=OptimizerSaves))
    translating = sgd()
    translating.register_load_state_dict_pre_hook(lambda optimizer, state: state)
    assert decides_itself(translating)
    assert problem(translating, {}) is None
    assert decides_itself(object())


def test_wrappers_are_looked_through(make_run):
    assert not decides_itself(torch.compile(nn.Linear(2, 2)))
    run = make_run()
    assert not decides_itself(run.optimizer)
    assert not decides_itself(run.model)
    assert problem(run.optimizer, run.optimizer.state_dict()) is None
    assert problem(run.optimizer, {}) == "it is not the state of an optimizer"
    own = run.accelerator.prepare(sgd(kind=OptimizerLoads))
    assert decides_itself(own)
    model = nn.Linear(2, 2)
    assert problem(described(torch.compile(model)).bare, model.state_dict()) is None
    assert problem(described(torch.compile(model)).bare, {}) == "missing: bias, weight"


def test_a_schedule_is_no_wrapper_of_its_optimizer():
    optimizer = sgd()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert not decides_itself(optimizer)
    assert decides_itself(schedule)
    with ExitStack() as undo:
        load_tentatively(undo, "scheduler.bin", schedule, lambda: schedule.load_state_dict({"last_epoch": 7}))
        assert schedule.last_epoch == 7
    assert schedule.last_epoch == 0


def test_what_is_no_mapping_is_no_state():
    for target in (nn.Linear(2, 2), sgd()):
        assert problem(target, [1]) == "it holds a list, not a state"
        assert problem(target, None) == "it holds a NoneType, not a state"


def test_all_that_does_not_fit_a_model_is_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = model.state_dict()
    assert problem(model, state) is None
    assert problem(model, {name: value for name, value in state.items() if "num_batches" not in name}) is None
    scalar = state | {"1.num_batches_tracked": torch.zeros(1, dtype=torch.long)}
    assert problem(model, scalar) is None, "as files of old versions of torch have it"
    long = state | {"1.num_batches_tracked": torch.zeros(2, dtype=torch.long)}
    assert problem(model, long) == "size mismatch of 1.num_batches_tracked: [2] in the checkpoint, [] here"
    single = nn.Linear(1, 1)
    assert problem(single, single.state_dict() | {"weight": torch.zeros(1)}) == (
        "size mismatch of weight: [1] in the checkpoint, [1, 1] here"
    )
    less = {name: value for name, value in state.items() if name not in ("0.bias", "1.weight")}
    assert problem(model, less) == "missing: 0.bias, 1.weight"
    assert problem(model, state | {"b": 1, "a": 2}) == "unexpected: a, b"
    assert problem(model, less | {"x": 1, "0.weight": torch.zeros(3, 1)}) == (
        "missing: 0.bias, 1.weight; unexpected: x; size mismatch of 0.weight: [3, 1] in the checkpoint, [3, 2] here"
    )
    assert problem(model, state | {"0.bias": [0.0] * 3}) == "0.bias is a list, not a tensor"
    assert problem(model, less | {"x": 1, "0.weight": 3}, strict=False) == "0.weight is a int, not a tensor"
    assert problem(model, less | {"x": 1}, strict=False) is None


def test_what_has_no_shape_is_not_judged_by_one():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return "x"

        def set_extra_state(self, state):
            pass

    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    assert decides_itself(lazy), "its hooks translate"
    assert problem(lazy, {}) is None
    extra = Extra(2, 2)
    assert problem(extra, extra.state_dict() | {"_extra_state": 3}) is None
    extra = nn.ModuleList([Extra(2, 2) for _ in range(5)])
    wrong = {name: torch.zeros(9) for name in extra.state_dict()}
    assert problem(extra, wrong).count("size mismatch of") == 10


def test_all_that_does_not_fit_an_optimizer_is_named():
    model = nn.Linear(2, 3)
    optimizer = sgd(model, momentum=0.9)
    group = {"params": [0, 1]}
    for nothing in ({}, {"param_groups": [group]}, {"state": {}}, {"param_groups": None, "state": {}}):
        assert problem(optimizer, nothing) == "it is not the state of an optimizer"
    for states in ([], {0: 3}, {0: {}, 1: [1]}):
        assert problem(optimizer, {"param_groups": [group], "state": states}) == "it is not the state of an optimizer"
    for groups in (3, [3], [{}], [{"params": 3}]):
        wrong = problem(optimizer, {"param_groups": groups, "state": {}})
        assert wrong == "its param_groups are not those of an optimizer"
    for groups, lengths in (([], []), ([group, group], [2, 2]), ([{"params": [0]}], [1])):
        assert problem(optimizer, {"param_groups": groups, "state": {}}) == (
            f"it has parameter groups of {lengths} parameters, the optimizer here has [2]"
        )
    assert problem(optimizer, {"param_groups": [group], "state": {}}) is None


@pytest.mark.parametrize(
    "key",
    [
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
        *("grad_avg", "acc_delta", "sum", "prev", "step_size", "ax"),
    ],
)
def test_the_state_of_a_parameter_has_its_shape_or_is_one_number(key):
    model = nn.Linear(2, 3)
    optimizer = sgd(model)

    def told(value, number=1, groups=({"params": [0, 1]},), optimizer=optimizer):
        return problem(optimizer, {"param_groups": list(groups), "state": {number: {"step": 1, key: value}}})

    message = f"size mismatch of {key} of parameter 1: [2] in the checkpoint, the parameter here has [3]"
    assert told(torch.zeros(3)) is None
    assert told(torch.zeros(1)) is None
    assert told(torch.zeros(())) is None
    assert told("anything") is None
    assert told(torch.zeros(2)) == message
    assert told(torch.zeros(2), number=2) is None, "nobody's"
    # By the places in the groups, not by the numbers.
    assert told(torch.zeros(3), groups=[{"params": [1, 0]}]) == (
        f"size mismatch of {key} of parameter 1: [3] in the checkpoint, the parameter here has [3, 2]"
    )
    two = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    assert told(torch.zeros(2), groups=[{"params": [0]}, {"params": [1]}], optimizer=two) == message
    foreign = Foreign(model.parameters())
    assert told(torch.zeros(2), optimizer=foreign) is None, "what its state means only it knows"
    other = problem(optimizer, {"param_groups": [{"params": [0, 1]}], "state": {1: {"other": torch.zeros(2)}}})
    assert other is None


POSITION = {"epoch": 0, "rounds": 0, "offset": 0, "global_batch": 4, "length": 24, "live": True, "key": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"epoch": 3, "live": False, "key": {"a": 1}, "generator": torch.get_rng_state()}, None),
        *[({name: -1}, f"its {name} is -1") for name in ("epoch", "rounds", "offset", "global_batch", "length")],
        *[({name: None}, f"its {name} is None") for name in ("epoch", "rounds", "offset", "global_batch", "length")],
        *[({name: 0}, None) for name in ("epoch", "rounds", "offset", "global_batch", "length")],
        ({"epoch": True}, "its epoch is True"),
        ({"length": "x"}, "its length is 'x'"),
        ({"live": 1}, "its live is 1"),
        ({"live": "x"}, "its live is 'x'"),
        ({"key": ["x"]}, "its key is ['x']"),
        ({"generator": "x"}, "its generator is a str, not the state of one"),
        ({"generator": torch.zeros(3)}, "its generator is a Tensor, not the state of one"),
    ],
)
def test_a_position_is_told_by_its_fields(change, message):
    assert position_problem(POSITION | change) == message


def test_a_position_without_a_field_is_none():
    for name in ("epoch", "rounds", "offset", "global_batch", "length", "live"):
        assert position_problem({key: value for key, value in POSITION.items() if key != name}) == f"its {name} is None"
    assert position_problem({key: value for key, value in POSITION.items() if key != "key"}) is None
    assert position_problem([1]) == "it holds a list"


class Counter:
    def __init__(self):
        self.state = {"counts": [1]}
        self.stubborn = False

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if self.stubborn:
            raise OSError("no way back")
        self.state = state


def test_what_was_tried_is_put_back_even_when_the_state_was_changed_in_place():
    counter = Counter()
    with ExitStack() as undo:
        load_tentatively(undo, "c.pkl", counter, lambda: counter.state["counts"].append(2))
        assert counter.state == {"counts": [1, 2]}
    assert counter.state == {"counts": [1]}
    with ExitStack() as undo:
        load_tentatively(undo, "c.pkl", counter, lambda: counter.state["counts"].append(2))
        undo.pop_all()
    assert counter.state == {"counts": [1, 2]}


def test_a_model_is_put_back_with_what_is_no_tensor():
    class Extra(OwnLoad):
        extra: tuple = ([[1]],)

        def get_extra_state(self):
            return self.extra[0]

        def set_extra_state(self, state):
            self.extra = (state,)

    model = Extra(2, 2)
    before = model.weight.clone()

    def spoil():
        model.extra[0][0].append(2)
        with torch.no_grad():
            model.weight.add_(1)

    with ExitStack() as undo:
        load_tentatively(undo, "model", torch.compile(model), spoil)
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)
    assert model.extra == ([[1]],)


def test_the_weights_of_a_model_are_kept_in_host_memory():
    class Noted(torch.Tensor):
        asked = None

        def detach(self):
            return self

        def to(self, *arguments, **options):
            Noted.asked = arguments, options
            return torch.ones(2)

    class Kept(nn.Module):
        def state_dict(self):
            return {"weight": torch.zeros(2).as_subclass(Noted)}

        def load_state_dict(self, state):
            self.state = state

    model = Kept()
    with ExitStack() as undo:
        load_tentatively(undo, "model", model, lambda: None)
    assert Noted.asked == (("cpu",), {"copy": True})
    assert model.state["weight"].tolist() == [1.0, 1.0]


def test_errors_of_a_try_name_the_state():
    counter = Counter()

    def fail(error):
        counter.state = {}
        raise error

    with pytest.raises(CheckpointError) as told, ExitStack() as undo:
        load_tentatively(undo, "c.pkl", counter, lambda: fail(OverflowError("too many")))
    assert str(told.value) == "c.pkl does not fit what is prepared: OverflowError: too many"
    assert type(told.value.__cause__) is OverflowError
    own = CheckpointError("my words")
    with pytest.raises(CheckpointError, match="my words") as told, ExitStack() as undo:
        load_tentatively(undo, "c.pkl", counter, lambda: fail(own))
    assert told.value is own
    counter.stubborn = True
    with pytest.raises(CheckpointError) as told, ExitStack() as undo:
        load_tentatively(undo, "c.pkl", counter, lambda: None)
    assert str(told.value) == (
        "c.pkl does not fit, and what it was to replace could not be put back: OSError: no way back; "
        "start again instead of training on"
    )
