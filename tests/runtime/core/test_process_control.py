"""Decorators, order of processes, shares of an input, triggers."""

import time

import numpy
import pytest
import torch

from orc.runtime import Accelerator, AcceleratorState, PartialState, RunContext, use_context
from orc.runtime.core.environment import LaunchEnvironment
from orc.runtime.core.process_control import split


def fake_rank(rank, servers=2, per_server=4):
    """The context of one of several processes that do not exist."""
    return RunContext(
        rank=rank,
        world_size=servers * per_server,
        local_rank=rank % per_server,
        local_world_size=per_server,
        node_rank=rank // per_server,
        device=torch.device("cpu"),
        backend="gloo",
        env=LaunchEnvironment("test", rank, servers * per_server, rank % per_server, per_server),
    )


def printed_by(decorate):
    """On which of 2 servers x 4 processes a decorated function runs."""
    ran = []
    for rank in range(8):
        with use_context(fake_rank(rank)):
            state = PartialState()
            function = decorate(state)(lambda state=state: f"Printed on process {state.local_process_index}")
            if (text := function()) is not None:
                ran.append((rank, text))
    return ran


def test_decorators_choose_processes():
    assert printed_by(lambda s: s.on_local_process(local_process_index=2)) == [
        (2, "Printed on process 2"),
        (6, "Printed on process 2"),
    ]
    assert [rank for rank, _ in printed_by(lambda s: s.on_local_main_process)] == [0, 4]
    assert [rank for rank, _ in printed_by(lambda s: s.on_main_process)] == [0]
    assert [rank for rank, _ in printed_by(lambda s: s.on_main_process())] == [0]
    assert [rank for rank, _ in printed_by(lambda s: s.on_last_process)] == [7]
    assert [rank for rank, _ in printed_by(lambda s: s.on_process(process_index=5))] == [5]


def test_a_decorator_keeps_name_and_passes_arguments():
    @PartialState().on_main_process
    def add(a, *, b):
        """Adds."""
        return a + b

    assert (add(1, b=2), add.__name__, add.__doc__) == (3, "add", "Adds.")


def test_on_process_without_an_index_is_an_error():
    with pytest.raises(ValueError, match="on_process needs process_index"):
        PartialState().on_process(lambda: None)
    with pytest.raises(ValueError, match="on_local_process needs local_process_index"):
        PartialState().on_local_process(lambda: None)


def test_print_speaks_once_per_server(capsys):
    for rank in range(8):
        with use_context(fake_rank(rank)):
            Accelerator().print("hello", end=f" {rank}\n")
    assert capsys.readouterr().out == "hello 0\nhello 4\n"


def test_split_between_processes_documented_example():
    parts = [split(["A", "B", "C"], rank, 2) for rank in range(2)]
    assert parts == [["A", "B"], ["C"]]
    assert [split(["A", "B", "C"], rank, 2, apply_padding=True) for rank in range(2)] == [["A", "B"], ["C", "C"]]


def test_split_of_every_kind():
    assert [split((1, 2, 3, 4), r, 3) for r in range(3)] == [(1, 2), (3,), (4,)]
    assert [split((1, 2, 3, 4), r, 3, True) for r in range(3)] == [(1, 2), (3, 4), (4, 4)]
    tensors = [split(torch.arange(6).view(3, 2), r, 2, apply_padding=True) for r in range(2)]
    assert [t.tolist() for t in tensors] == [[[0, 1], [2, 3]], [[4, 5], [4, 5]]]
    assert [split([], r, 2, True) for r in range(2)] == [[], []]
    assert [list(split(range(3), r, 2, True)) for r in range(2)] == [[0, 1], [2, 2]]
    assert [split(["A"], r, 3) for r in range(3)] == [["A"], [], []]
    assert [split(["A"], r, 3, True) for r in range(3)] == [["A"], ["A"], ["A"]]


def test_a_dict_is_split_in_step_and_unequal_lengths_are_refused():
    data = {"prompt": ["a", "b", "c"], "seed": torch.arange(3)}
    zero, one = (split(data, rank, 2) for rank in range(2))
    assert (zero["prompt"], zero["seed"].tolist()) == (["a", "b"], [0, 1])
    assert (one["prompt"], one["seed"].tolist()) == (["c"], [2])
    with pytest.raises(ValueError, match="same length, not 'a': 2, 'b': 1"):
        split({"a": [1, 2], "b": [1]}, 0, 2)


@pytest.mark.parametrize("value", ["text", 3, torch.tensor(1.0), {"a": "text"}])
def test_what_cannot_be_split_is_refused(value):
    with pytest.raises(TypeError, match="cannot split a"):
        split(value, 0, 2)


@pytest.mark.distributed
def test_split_over_real_processes_from_every_handle(run_ranks):
    def body():
        handles = (Accelerator(), PartialState(), AcceleratorState())
        results = []
        for handle in handles:
            with handle.split_between_processes(["dog", "cat", "chicken"]) as part:
                results.append(part)
        return results

    assert run_ranks(2, body) == [[["dog", "cat"]] * 3, [["chicken"]] * 3]


@pytest.mark.distributed
def test_the_main_process_goes_first(run_ranks, tmp_path):
    def body(path, method):
        accelerator = Accelerator()
        with getattr(accelerator, method)():
            if accelerator.process_index == 0:
                time.sleep(0.5)
            with path.open("a") as file:
                file.write(f"{accelerator.process_index} ")

    for method in ("main_process_first", "local_main_process_first"):
        path = tmp_path / method
        run_ranks(2, body, path, method)
        assert path.read_text() == "0 1 "


@pytest.mark.distributed
def test_an_error_in_the_main_process_does_not_hold_the_others(run_ranks):
    def body():
        accelerator = Accelerator()
        try:
            with accelerator.main_process_first():
                if accelerator.is_main_process:
                    raise OSError("no network")
        except OSError:
            return "failed"
        return "went on"

    assert run_ranks(2, body) == ["failed", "went on"]


@pytest.mark.distributed
def test_a_trigger_on_one_process_is_seen_by_all_once(run_ranks):
    def body():
        accelerator = Accelerator()
        if accelerator.process_index == 1:
            accelerator.set_trigger()
        return accelerator.check_trigger(), accelerator.check_trigger(), accelerator.check_breakpoint()

    assert run_ranks(2, body) == [(True, False, False)] * 2


def test_a_trigger_in_one_process():
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert (accelerator.check_trigger(), accelerator.check_trigger()) == (True, False)


@pytest.mark.distributed
def test_places_on_two_machines(run_ranks):
    def body():
        a = Accelerator()
        a.wait_for_everyone()
        return (
            (a.num_processes, a.process_index, a.local_process_index),
            (a.is_main_process, a.is_local_main_process, a.is_last_process, a.use_distributed),
        )

    assert run_ranks(4, body, nodes=2) == [
        ((4, 0, 0), (True, True, False, True)),
        ((4, 1, 1), (False, False, False, True)),
        ((4, 2, 0), (False, True, False, True)),
        ((4, 3, 1), (False, False, True, True)),
    ]


class Rows:
    """What the library `datasets` offers of its datasets."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, indices):
        return Rows([self.rows[i] for i in indices])


def test_datasets_and_arrays_are_split():
    parts = [split(Rows("abc"), rank, 2, apply_padding=True) for rank in range(2)]
    assert [part.rows for part in parts] == [["a", "b"], ["c", "c"]]
    assert split(Rows("abc"), 1, 2).rows == ["c"]
    arrays = [split({"x": numpy.arange(3), "y": Rows("abc")}, rank, 2, apply_padding=True) for rank in range(2)]
    assert [a["x"].tolist() for a in arrays] == [[0, 1], [2, 2]]
    assert arrays[1]["y"].rows == ["c", "c"]


def test_more_processes_than_elements():
    names = [split({"a": (1,), "b": torch.ones(1)}, rank, 3, apply_padding=True) for rank in range(3)]
    assert [n["a"] for n in names] == [(1,)] * 3
    assert [len(n["b"]) for n in names] == [1] * 3
    assert [split(torch.arange(1), rank, 3).tolist() for rank in range(3)] == [[0], [], []]
