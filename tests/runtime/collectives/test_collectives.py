"""gather, reduce, broadcast, pad: documented numbers, every dtype and nesting, one collective per kind of payload."""

import collections
import dataclasses

import pytest
import torch
import torch.distributed as dist

from orc.runtime import (
    DistributedOperationException,
    PartialState,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)

pytestmark = pytest.mark.distributed

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    extra: dict


def mixed(rank):
    """Every dtype and container, different on each rank."""
    return {
        "float": torch.full((2, 3), float(rank)),
        "pair": Pair(torch.tensor([rank, 7]), [torch.tensor([[rank]], dtype=torch.int16)]),
        "out": Output(torch.full((1, 2), rank, dtype=torch.bfloat16), {"mask": torch.tensor([rank == 0, True])}),
        "half": torch.full((3,), rank, dtype=torch.float16),
        "scalar": torch.tensor(float(rank)),
        "empty": torch.empty(0, 5),
        "odd": torch.arange(12.0).view(3, 4).t()[:1] + rank,  # not contiguous
        "bytes": (torch.full((3,), rank, dtype=torch.uint8), torch.full((1,), rank, dtype=torch.float64)),
        "complex": torch.full((2,), complex(rank, 1)),
    }


def test_gather_keeps_structure_types_and_dtypes(run_ranks):
    def body():
        assert [tuple(op(torch.empty(0, 5)).shape) for op in (gather, reduce, broadcast)] == [(0, 5)] * 3
        return gather(mixed(PartialState().process_index))

    for result in run_ranks(2, body):
        assert result["float"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
        assert type(result["pair"]).__name__ == "Pair"
        assert result["pair"].left.tolist() == [0, 7, 1, 7]
        assert result["pair"].right[0].tolist() == [[0], [1]]
        assert result["pair"].right[0].dtype == torch.int16
        assert type(result["out"]).__name__ == "Output"
        assert result["out"].logits.dtype == torch.bfloat16
        assert result["out"].logits.float().tolist() == [[0, 0], [1, 1]]
        assert result["out"].extra["mask"].tolist() == [True, True, False, True]
        assert result["half"].tolist() == [0, 0, 0, 1, 1, 1]
        assert result["scalar"].tolist() == [0.0, 1.0]
        assert result["empty"].shape == (0, 5)
        assert result["odd"].tolist() == [[0, 4, 8], [1, 5, 9]]
        assert [t.tolist() for t in result["bytes"]] == [[0, 0, 0, 1, 1, 1], [0.0, 1.0]]
        assert result["complex"].tolist() == [1j, 1j, 1 + 1j, 1 + 1j]


def test_large_tensors_travel_next_to_small_ones(run_ranks):
    def body():
        rank = PartialState().process_index
        large, middle = torch.full((600, 500), rank + 0.5), torch.full((200_000,), rank, dtype=torch.int32)
        result = gather([large, torch.tensor([rank]), middle, middle.clone()])
        return (
            result[0].shape,
            result[0][599, 499].item(),
            result[0][600, 0].item(),
            result[1].tolist(),
            [(t[199_999].item(), t[200_000].item(), len(t)) for t in result[2:]],
        )

    expected = ((1200, 500), 0.5, 1.5, [0, 1], [(0, 1, 400_000)] * 2)
    assert run_ranks(2, body) == [expected] * 2


def test_many_tensors_of_many_dtypes_make_one_collective(run_ranks):
    def body():
        ctx = PartialState().ctx
        counts = collections.Counter()
        for name in ("all_gather_single", "all_reduce", "broadcast"):

            def count(real, name):
                def counting(*args, **kwargs):
                    counts[name] += 1
                    return real(*args, **kwargs)

                return counting

            setattr(dist, name, count(getattr(dist, name), name))
        data = {i: torch.full((4,), i, dtype=(torch.float32, torch.int64)[i % 2]) for i in range(64)}
        seen = []
        for call in (
            lambda: gather(data, ctx=ctx),
            lambda: broadcast(data, ctx=ctx),
            lambda: reduce(data, "sum", ctx=ctx),
            lambda: pad_across_processes(data, ctx=ctx),
        ):
            call()  # the first time finds out how much room is needed
            counts.clear()
            call()
            seen.append(dict(counts))
        return seen

    assert run_ranks(2, body) == [[{"all_gather_single": 1}] * 4] * 2


def test_gradients_do_not_flow_and_inputs_stay(run_ranks):
    def body():
        leaf = torch.ones(2, requires_grad=True)
        results = gather(leaf * 1), reduce([leaf * 1, leaf.detach()], "sum")[0]
        return [r.requires_grad for r in results], leaf.tolist()

    assert run_ranks(2, body) == [([False, False], [1.0, 1.0])] * 2


def test_reduce_documented_numbers(run_ranks):
    def body():
        rank = PartialState().process_index
        value = torch.arange(2) + 1 + 2 * rank
        return [reduce(value, how).tolist() for how in ("sum", "mean", "none")], value.tolist()

    zero, one = run_ranks(2, body)
    assert zero == ([[4, 6], [2.0, 3.0], [1, 2]], [1, 2])
    assert one == ([[4, 6], [2.0, 3.0], [3, 4]], [3, 4])


def test_reduce_every_dtype(run_ranks):
    def body():
        total = reduce(mixed(PartialState().process_index), "sum")
        mean = reduce(mixed(PartialState().process_index), "mean")
        return total, mean

    for total, mean in run_ranks(2, body):
        assert total["float"].tolist() == [[1.0] * 3] * 2
        assert total["pair"].left.tolist() == [1, 14]
        assert total["out"].logits.dtype == torch.bfloat16
        assert total["out"].logits.float().tolist() == [[1, 1]]
        assert total["out"].extra["mask"].tolist() == [1, 2], "truth values are counted"
        assert total["half"].dtype == torch.float16
        assert total["scalar"].item() == 1.0
        assert total["empty"].shape == (0, 5)
        assert total["odd"].tolist() == [[1, 9, 17]]
        assert total["complex"].tolist() == [1 + 2j, 1 + 2j]
        assert mean["half"].tolist() == [0.5] * 3
        assert mean["half"].dtype == torch.float16
        assert mean["pair"].left.tolist() == [0.5, 7.0]


def test_means_of_large_tensors_are_means(run_ranks):
    """Large tensors are not packed with others, and go another way."""

    def body():
        rank = PartialState().process_index
        large = torch.full((1 << 19,), rank * 2.0)
        mean, small = reduce([large, torch.tensor(rank * 2.0)], "mean")
        return large.nbytes, mean.unique().tolist(), small.item(), reduce(large, "sum").unique().tolist()

    assert run_ranks(2, body) == [(2 << 20, [1.0], 1.0, [2.0])] * 2


def test_broadcast_fills_in_place(run_ranks):
    def body():
        data = mixed(PartialState().process_index + 1)
        result = broadcast(data, from_process=1)
        assert result is data
        return data

    for data in run_ranks(2, body):
        assert data["float"].tolist() == [[2.0] * 3] * 2
        assert data["pair"].left.tolist() == [2, 7]
        assert data["out"].extra["mask"].tolist() == [False, True]
        assert data["out"].logits.float().tolist() == [[2, 2]]
        assert data["scalar"].item() == 2.0
        assert data["odd"].tolist() == [[2, 6, 10]]
        assert data["complex"].tolist() == [2 + 1j] * 2


def test_tensors_of_many_pieces_are_reduced_into_memory_of_their_own(run_ranks):
    def check():
        from orc.runtime import gather, reduce

        rank = PartialState().process_index
        counted = (torch.arange(9 << 20) % 1000).view(3, -1).t()  # not contiguous
        turned = counted.float() + rank  # 36 MiB
        imaginary = torch.full((1 << 22,), complex(rank, 1.0))
        whole = torch.full((9 << 20,), 1 + 2 * rank, dtype=torch.int32)
        mean, counts = reduce({"turned": turned, "whole": whole}, "mean"), reduce([whole, imaginary], "sum")
        joined = gather(whole)
        return (
            torch.equal(mean["turned"], counted + 0.5),
            (mean["whole"].dtype, *mean["whole"].unique().tolist(), *counts[0].unique().tolist()),
            [numbers.unique().tolist() for numbers in torch.view_as_real(counts[1]).unbind(-1)],
            joined.view(2, -1).sum(1, dtype=torch.int64).tolist() == [9 << 20, 27 << 20],
            turned[0, 0].item() == rank and mean["turned"].is_contiguous(),
        )

    results = run_ranks(2, check)
    assert results == [(True, (torch.float32, 2.0, 4), [[1.0], [2.0]], True, True)] * 2


def test_broadcast_of_parameters_and_large_tensors(run_ranks):
    def body():
        rank = PartialState().process_index
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        large = torch.full((1000, 400), float(rank)).t()  # not contiguous
        broadcast([parameter, large])
        return parameter.tolist(), parameter.requires_grad, large.unique().tolist()

    assert run_ranks(2, body) == [([0.0] * 3, True, [0.0])] * 2


def test_pad_documented_shapes(run_ranks):
    def body():
        rank = PartialState().process_index
        return (
            pad_across_processes(torch.arange(rank + 1)).tolist(),
            pad_across_processes(torch.arange(rank + 1) + 5, pad_index=-1, pad_first=True).tolist(),
            pad_across_processes({"a": [torch.ones(2, 1 + 2 * rank)], "b": torch.tensor(1.0)}, dim=1),
            pad_across_processes(torch.ones(1, rank + 1), dim=-1).shape,
            pad_across_processes([torch.ones(rank * 2, 3), torch.ones(rank + 1, dtype=torch.bool)], pad_index=1),
        )

    zero, one = run_ranks(2, body)
    assert zero[:2] == ([0, 0], [-1, 5])
    assert one[:2] == ([0, 1], [5, 6])
    assert zero[2]["a"][0].tolist() == [[1.0, 0.0, 0.0]] * 2
    assert one[2]["a"][0].shape == (2, 3)
    assert zero[2]["b"].item() == 1.0
    assert zero[3] == one[3] == (1, 2)
    assert zero[4][0].tolist() == [[1.0] * 3] * 2
    assert zero[4][1].tolist() == [True, True]


@pytest.mark.parametrize("debug", ["0", "1"])
def test_dimensions_are_padded_one_after_the_other(run_ranks, debug):
    def body():
        rank = PartialState().process_index
        predictions = {"ids": torch.full((3 - rank, 5 + 2 * rank), rank), "length": torch.ones(3 - rank)}
        wide = pad_across_processes(predictions, dim=1, pad_index=-1)
        assert wide["ids"].shape == (3 - rank, 7)
        return gather(pad_across_processes(wide, pad_index=-1))

    for result in run_ranks(2, body, env={"ORC_DEBUG_MODE": debug}):
        assert result["ids"].tolist() == [[0] * 5 + [-1] * 2] * 3 + [[1] * 7] * 2 + [[-1] * 7]
        assert result["length"].tolist() == [1, 1, 1, 1, 1, -1]


def test_many_tensors_of_one_kind_are_padded_like_one(run_ranks):
    def body():
        rank = PartialState().process_index
        leaves = [torch.full((2, 1 + rank), float(i), requires_grad=True) for i in range(5)]
        results = []
        for dim in (1, -1):
            for first in (False, True):
                together = pad_across_processes(leaves, dim=dim, pad_index=-1, pad_first=first)
                alone = [pad_across_processes(leaf, dim=dim, pad_index=-1, pad_first=first) for leaf in leaves]
                results += [torch.equal(a, b) for a, b in zip(together, alone, strict=True)]
        return all(results), len(results), together[3].tolist(), together[3].requires_grad

    zero, one = run_ranks(2, body)
    assert zero == (True, 20, [[-1.0, 3.0]] * 2, True)
    assert one == (True, 20, [[3.0, 3.0]] * 2, True)


def test_nested_tensors_without_a_shape_stay_when_padding(run_ranks):
    def body():
        rank = PartialState().process_index
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
        with pytest.warns(UserWarning, match="stay as they are") as caught:
            padded = pad_across_processes({"ragged": ragged, "plain": torch.ones(1 + rank)})
        assert padded["ragged"] is ragged
        return caught[0].category.__name__, padded["plain"].shape[0]

    assert run_ranks(2, body) == [("CannotPadNestedTensorWarning", 2)] * 2


def test_objects(run_ranks):
    def body():
        rank = PartialState().process_index
        names = [f"secret-{rank}", {"rank": rank}]
        broadcast_object_list(names, from_process=1)
        return gather_object(["a", rank]), gather_object({"rank": rank}), names

    expected = (["a", 0, "a", 1], [{"rank": 0}, {"rank": 1}], ["secret-1", {"rank": 1}])
    assert run_ranks(2, body) == [expected] * 2


DEBUG_SWITCHES = [{"ORC_DEBUG_MODE": "1"}, {"ACCELERATE_DEBUG_MODE": "1"}, {"ACCELERATE_DEBUG_MODE": "yes"}]


@pytest.mark.parametrize("switch", DEBUG_SWITCHES, ids=lambda s: "=".join(*s.items()))
def test_debug_mode_names_operation_and_shapes_instead_of_hanging(run_ranks, switch):
    def body():
        shape = [(1, 5), (1, 2, 5)][PartialState().process_index]
        with pytest.raises(DistributedOperationException) as caught:
            broadcast(torch.zeros(shape))
        return str(caught.value)

    for message in run_ranks(2, body, env=switch, timeout=20):
        assert message.startswith("Cannot apply desired operation due to shape mismatches.")
        assert "Operation: `orc.runtime.broadcast`" in message
        assert "  - Process 0: [1, 5]\n  - Process 1: [1, 2, 5]" in message


@pytest.mark.parametrize("debug", ["0", "1"])
def test_operands_that_differ_are_named_with_rank_and_path(run_ranks, debug):
    def body():
        rank = PartialState().process_index
        same = [torch.zeros(2)]
        cases = [
            lambda: gather({"a": [torch.zeros(2), torch.zeros(3 + rank)]}),
            lambda: gather({"a": [torch.zeros(2)] + [torch.zeros(3)] * (1 - rank)}),
            lambda: reduce({"ab"[rank]: [torch.zeros(1)]}),
            lambda: broadcast(torch.zeros(2, dtype=(torch.float32, torch.int32)[rank])),
            lambda: pad_across_processes([torch.zeros(1)] * (rank + 1)),
            lambda: pad_across_processes(torch.zeros([2] * (rank + 1))),
            lambda: [gather, reduce][rank](torch.zeros(7)),
        ]
        messages = []
        for case in cases:
            gather(same)
            with pytest.raises(DistributedOperationException) as caught:
                case()
            messages.append(str(caught.value).splitlines()[-1].removeprefix("First difference: process 1 "))
        return messages, [leaf.tolist() for leaf in gather(same)]

    for messages, rest in run_ranks(2, body, env={"ORC_DEBUG_MODE": debug}, timeout=20):
        assert messages == [
            "differs from process 0 at ['a'][1]: shape [4] against [3]",
            "has 1 tensors, process 0 has 2",
            "has ['b'][0] where process 0 has ['a'][0]",
            "differs from process 0 in its tensor: torch.int32 against torch.float32",
            "has 2 tensors, process 0 has 1",
            "differs from process 0 in its tensor: shape [*, *] against [*]",
            "  - Process 1: `orc.runtime.reduce`",
        ]
        assert rest == [[0.0] * 4]


def test_an_operand_that_is_new_on_one_process_only_is_an_error_on_all_and_no_abort(run_ranks):
    """The short last batch: every other process sees a shape that it has seen before."""

    def body():
        rank = PartialState().process_index
        last = rank == PartialState().num_processes - 1
        raised = []
        for call in (gather, reduce, broadcast, pad_across_processes):
            for known, new in ((8, 5), (8, 30_000), (300_000, 299_999), (8, 300_000), (300_000, 8)):
                rows = torch.ones(known)
                for _ in range(70):  # however many shapes there were before
                    call(rows[: 1 + len(raised)])
                call(rows)
                if call is pad_across_processes:
                    assert call(torch.ones(new) if last else rows).shape == (max(known, new),)
                    continue
                with pytest.raises(DistributedOperationException, match="shape mismatches"):
                    call(torch.ones(new) if last else rows)
                raised.append(call.__name__)
                assert call(rows).shape[0] in (known, known * PartialState().num_processes)
        return len(raised)

    assert run_ranks(3, body) == [15] * 3


def test_dictionaries_may_be_filled_in_any_order(run_ranks):
    def body():
        rank = PartialState().process_index
        keys = ["loss", "acc", "n"][:: 1 - 2 * rank]
        values = {"loss": 1.0, "acc": 2.0, "n": 3.0}
        data = {key: torch.tensor([values[key] + 10 * rank]) for key in keys}
        inner = collections.OrderedDict((key, torch.full((rank + 1,), values[key])) for key in keys)
        gathered, total = gather([data])[0], reduce(data, "sum")
        padded = pad_across_processes(inner)
        assert list(gathered) == list(total) == list(padded) == keys, "each keeps its own order"
        assert type(padded) is collections.OrderedDict
        broadcast(data, from_process=1)
        plain = [{key: tensor.tolist() for key, tensor in sorted(one.items())} for one in (gathered, total, data)]
        return plain, {key: len(tensor) for key, tensor in padded.items()}

    for (gathered, total, data), lengths in run_ranks(2, body, env={"ORC_DEBUG_MODE": "1"}):
        assert gathered == {"acc": [2.0, 12.0], "loss": [1.0, 11.0], "n": [3.0, 13.0]}
        assert total == {"acc": [14.0], "loss": [12.0], "n": [16.0]}
        assert data == {"acc": [12.0], "loss": [11.0], "n": [13.0]}
        assert lengths == {"acc": 2, "loss": 2, "n": 2}


def test_a_result_does_not_keep_the_memory_of_the_others(run_ranks):
    def body():
        large = [torch.ones(8, 4) for _ in range(64)] + [torch.ones(3, dtype=torch.int64)] * 2
        medium = [torch.ones(40_000) for _ in range(4)]
        results = [*gather(large), *gather(medium), *reduce(large, "sum"), *gather([torch.ones(5)])]
        return [one.untyped_storage().nbytes() - one.nbytes for one in results]

    assert run_ranks(2, body) == [[0] * (66 + 4 + 66 + 1)] * 2


def test_objects_of_a_steady_size_need_one_collective(run_ranks):
    def body():
        rank = PartialState().process_index
        calls, real = [], dist.all_gather_single

        def counting(*args, **kwargs):
            calls.append(args[0].numel())
            return real(*args, **kwargs)

        dist.all_gather_single = counting
        counts = []
        for size in (10, 10, 50_000 * (rank + 1), 90_000, 90_000, 5, 5):
            calls.clear()
            result = gather_object([bytes([rank]) * size])
            assert [(one[0], len(one) == size or rank != place) for place, one in enumerate(result)] == [
                (0, True),
                (1, True),
            ]
            counts.append(len(calls))
        return counts, calls

    assert run_ranks(2, body) == [([1, 1, 2, 1, 1, 1, 1], [2 * 1024])] * 2


def test_what_is_no_tensor_is_named(run_ranks):
    def body():
        for call in (gather, reduce, broadcast, pad_across_processes):
            with pytest.raises(TypeError, match=r"\['x'\]\[1\] is of type str"):
                call({"x": [torch.ones(1), "text"]})

    run_ranks(2, body)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="unknown reduction 'product'"):
        reduce(torch.ones(1), "product")


def test_one_process_returns_its_input():
    value = {"a": torch.ones(2)}
    assert gather(value) is reduce(value) is broadcast(value) is pad_across_processes(value) is value
    assert gather_object(["x"]) == ["x"]
    assert broadcast_object_list(["x"]) == ["x"]
    assert not dist.is_initialized()


def test_a_closed_group_is_an_error_with_advice_that_helps(run_ranks):
    def body():
        from orc.runtime import Accelerator, AcceleratorState, ContextError

        def train():
            model = torch.nn.Linear(1, 1)
            accelerator = Accelerator()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            accelerator.backward(model(torch.ones(1, 1)).sum() * (accelerator.process_index + 1))
            optimizer.step()
            moved = gather(accelerator.unwrap_model(model).weight.grad).flatten().tolist()
            accelerator.end_training()
            return moved

        moved = train()
        with pytest.raises(ContextError, match="call it before end_training"):
            gather(torch.ones(1))
        with pytest.raises(ContextError, match=r"_reset_state\(True\) begins"):
            train()
        AcceleratorState._reset_state(True)
        assert train() == moved == [1.5, 1.5]

    run_ranks(2, body)


def test_ragged_tensors_are_not_padded():
    from orc.runtime import CannotPadNestedTensorWarning, RunContext

    ctx = RunContext.fake(0, 2)
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)
    with pytest.warns(CannotPadNestedTensorWarning, match="stay as they are"):
        result = pad_across_processes([ragged, torch.ones(2)], ctx=ctx)
    assert result[0] is ragged
