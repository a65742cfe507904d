"""What users test with: fake contexts, ranks as threads, ranks as processes, a clean state."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orc.runtime import (
    Accelerator,
    AcceleratorState,
    ContextError,
    DistributedOperationException,
    PartialState,
    RunContext,
    broadcast,
    broadcast_object_list,
    current_context,
    gather,
    gather_object,
    pad_across_processes,
    prepare_data_loader,
    reduce,
    set_seed,
    use_context,
)
from orc.runtime.core.context import peek_context
from orc.runtime.core.errors import LaunchError
from orc.runtime.testing import InMemoryWorld, RankFailure, isolated, reset, run_ranks, run_threads

# ---- fake contexts


def test_a_fake_context_stands_where_it_is_put():
    ctx = RunContext.fake(6, 8, nodes=2)
    with use_context(ctx):
        state = PartialState()
        assert (state.process_index, state.num_processes, state.local_process_index) == (6, 8, 2)
        assert (ctx.node_rank, ctx.local_world_size) == (1, 4)
        assert not state.is_main_process
        assert state.distributed_type == "MULTI_CPU"
        assert Accelerator().device.type == "cpu"
    assert RunContext.fake().world_size == 1


def test_a_fake_place_that_cannot_be_is_refused():
    with pytest.raises(LaunchError, match="rank 4 is not below the number of processes, 4"):
        RunContext.fake(4, 4)
    with pytest.raises(ValueError, match="5 ranks cannot be spread evenly over 2 nodes"):
        RunContext.fake(0, 5, nodes=2)
    with pytest.raises(ValueError, match="the world has 2 ranks, not 3"):
        RunContext.fake(0, 3, world=InMemoryWorld(2))


@pytest.mark.parametrize("seeded", [False, True])
def test_shards_of_every_rank_without_processes(seeded):
    shards = []
    for rank in range(4):
        with use_context(RunContext.fake(rank, 4)):
            set_seed(3)
            own = torch.Generator().manual_seed(1)
            data = DataLoader(list(range(32)), batch_size=2, shuffle=True, generator=own if seeded else None)
            loader = prepare_data_loader(data, rng_types=["generator"])
            shards.append([index for batch in loader for index in batch.tolist()])
    assert sorted(index for shard in shards for index in shard) == list(range(32))
    assert [len(shard) for shard in shards] == [8] * 4


def test_a_lone_rank_stands_among_mirrors():
    with use_context(RunContext.fake(1, 3)):
        assert gather(torch.tensor([7])).tolist() == [7, 7, 7]
        assert reduce(torch.tensor([2.0]), "sum").tolist() == [6.0]
        assert broadcast(torch.tensor([5])).tolist() == [5]
        assert gather_object(["a"]) == ["a"] * 3
        assert broadcast_object_list(["b"], from_process=2) == ["b"]
        PartialState().wait_for_everyone()
        with pytest.raises(ContextError, match="has no peers"):
            dist.recv(torch.zeros(1), src=0, group=current_context().group)


def test_contexts_share_no_settings():
    first, second = RunContext.fake(0, 2), RunContext.fake(0, 2)
    with use_context(first):
        Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    with use_context(second):
        accelerator = Accelerator()
        assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)
    assert peek_context() is None


@pytest.mark.distributed
def test_the_end_of_a_fake_run_leaves_the_real_one_alone(run_ranks):
    def body():
        real = Accelerator()
        for ctx in (RunContext.fake(0, 2), RunContext.fake()):
            with use_context(ctx):
                Accelerator().end_training()
                PartialState().destroy_process_group()
        return real.gather(torch.tensor([real.process_index])).tolist()

    assert run_ranks(2, body) == [[0, 1]] * 2


# ---- threads


def collectives():
    accelerator = Accelerator()
    rank = accelerator.process_index
    filled = torch.full((2,), rank)
    broadcast(filled, from_process=1)
    return {
        "gather": gather(torch.tensor([rank])).tolist(),
        "sum": reduce(torch.tensor([1.0 + rank]), "sum").tolist(),
        "mean": reduce({"loss": torch.tensor(float(rank))})["loss"].item(),
        "pad": pad_across_processes(torch.arange(rank + 1)).tolist(),
        "broadcast": filled.tolist(),
        "objects": gather_object([f"rank {rank}"]),
        "list": broadcast_object_list([rank, "x"]),
        "main": accelerator.is_main_process,
    }


def test_collectives_between_threads():
    results = run_threads(3, collectives)
    for rank, result in enumerate(results):
        assert result["gather"] == [0, 1, 2]
        assert result["sum"] == [6.0]
        assert result["mean"] == 1.0
        assert result["pad"] == [*range(rank + 1), *[0] * (2 - rank)]
        assert result["broadcast"] == [1, 1]
        assert result["objects"] == ["rank 0", "rank 1", "rank 2"]
        assert result["list"] == [0, "x"]
        assert result["main"] is (rank == 0)


def test_every_torch_collective_between_threads():
    def body():
        ctx = current_context()
        group, rank = ctx.group, ctx.rank
        ones = torch.full((2,), float(rank + 1))
        lists = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(lists, ones, group=group)
        reduced = ones.clone()
        dist.reduce(reduced, 1, group=group)
        gathered = [torch.zeros(2) for _ in range(2)] if rank == 0 else None
        dist.gather(ones, gathered, dst=0, group=group)
        mine = torch.zeros(2)
        dist.scatter(mine, [torch.full((2,), 10.0), torch.full((2,), 20.0)] if rank == 0 else None, 0, group=group)
        part = torch.zeros(1)
        dist.reduce_scatter(part, [torch.tensor([1.0 + rank]), torch.tensor([3.0])], group=group)
        turned = [torch.zeros(1), torch.zeros(1)]
        dist.all_to_all(turned, [torch.tensor([rank * 10.0]), torch.tensor([rank * 10.0 + 1])], group=group)
        extremes = [torch.tensor([rank]) for _ in range(4)]
        for tensor, op in zip(extremes, ("MIN", "MAX", "PRODUCT", "BOR"), strict=True):
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
        other = torch.zeros(2)
        work = dist.isend(ones, 1 - rank, group=group)
        dist.recv(other, 1 - rank, group=group)
        work.wait()
        return {
            "all_gather": [t.tolist() for t in lists],
            "reduce": reduced.tolist(),
            "gather": gathered and [t.tolist() for t in gathered],
            "scatter": mine.tolist(),
            "reduce_scatter": part.tolist(),
            "all_to_all": [t.item() for t in turned],
            "extremes": [t.item() for t in extremes],
            "received": other.tolist(),
        }

    first, second = run_threads(2, body)
    assert first["all_gather"] == second["all_gather"] == [[1.0, 1.0], [2.0, 2.0]]
    assert (first["reduce"], second["reduce"]) == ([1.0, 1.0], [3.0, 3.0])
    assert (first["gather"], second["gather"]) == ([[1.0, 1.0], [2.0, 2.0]], None)
    assert (first["scatter"], second["scatter"]) == ([10.0, 10.0], [20.0, 20.0])
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([3.0], [6.0])
    assert (first["all_to_all"], second["all_to_all"]) == ([0.0, 10.0], [1.0, 11.0])
    assert first["extremes"] == second["extremes"] == [0, 1, 0, 1]
    assert (first["received"], second["received"]) == ([2.0, 2.0], [1.0, 1.0])


def training():
    accelerator = Accelerator()
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(float(accelerator.process_index))  # DDP gives everybody those of rank 0
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return type(model).__name__, len(loader), accelerator.unwrap_model(model).weight.tolist()


@pytest.mark.distributed
def test_threads_train_as_processes_do(run_ranks):
    assert run_threads(2, training) == run_ranks(2, training)


def test_dispatch_and_checkpoints_between_threads(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(8))

    def body():
        accelerator = Accelerator()
        batches = [batch.tolist() for batch in accelerator.prepare(DataLoader(Stream(), batch_size=2))]
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.save_state(str(tmp_path / "state"))
        with torch.no_grad():
            accelerator.unwrap_model(model).weight.zero_()
        accelerator.load_state(str(tmp_path / "state"))
        return batches, bool(accelerator.unwrap_model(model).weight.any())

    assert run_threads(2, body) == [([[0, 1], [4, 5]], True), ([[2, 3], [6, 7]], True)]


def test_different_collectives_are_named_instead_of_hanging():
    def shapes():
        gather(torch.ones(1 + PartialState().process_index))

    with pytest.raises(DistributedOperationException, match=r"Process 0: \[1\]\n.*Process 1: \[2\]"):
        run_threads(2, shapes)

    def calls():
        ctx = current_context()
        ctx.barrier() if ctx.rank else gather(torch.ones(1))

    with pytest.raises(DistributedOperationException, match=r"Process 1: barrier\(\)"):
        run_threads(2, calls)


def test_a_missing_rank_is_named():
    side_by_side = threading.Barrier(2)

    def body():
        if PartialState().process_index != 2:
            side_by_side.wait()
            gather(torch.ones(1))

    with pytest.raises(ContextError, match=r"ranks \[0, 1\] wait in all_gather_single.* for rank 2, for more than 1 s"):
        run_threads(3, body, timeout_s=1)


def test_the_rank_that_fails_is_the_one_reported():
    def body():
        if PartialState().process_index == 1:
            raise KeyError("lost")
        gather(torch.ones(1))

    started = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        run_threads(2, body, timeout_s=150)
    assert caught.value.__notes__ == ["on rank 1 of 2"]
    assert time.monotonic() - started < 100


def test_threads_leave_nothing_behind():
    from torch.distributed import distributed_c10d

    before = len(distributed_c10d._world.pg_group_ranks)
    threads = set(threading.enumerate())
    default = current_context()
    run_threads(4, collectives)
    run_threads(2, training)
    assert len(distributed_c10d._world.pg_group_ranks) == before
    assert current_context() is default
    assert set(threading.enumerate()) <= threads


# ---- processes


def where(word):
    accelerator = Accelerator()
    return word, accelerator.process_index, gather(torch.tensor([accelerator.process_index])).tolist(), os.getpid()


@pytest.mark.distributed
def test_functions_run_in_processes(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # of this test, not of the ranks
    first, second = run_ranks(2, where, "hello")
    assert (first[:3], second[:3]) == (("hello", 0, [0, 1]), ("hello", 1, [0, 1]))
    assert len({first[3], second[3], os.getpid()}) == 3
    assert run_ranks(2, lambda: (os.environ["GROUP_RANK"], Accelerator().mixed_precision), nodes=2) == [
        ("0", "no"),
        ("1", "no"),
    ]
    assert run_ranks(1, lambda: os.environ["ORC_SEED"], env=[{"ORC_SEED": "4"}]) == ["4"]


def meets_where_nobody_else_can():
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    return where("here")[2]


@pytest.mark.distributed
def test_nobody_else_is_given_the_port_before_the_processes_meet_there():
    assert run_ranks(2, meets_where_nobody_else_can) == [[0, 1]] * 2


@pytest.mark.distributed
def test_failing_processes_are_reported_with_their_tracebacks():
    def fails():
        state = PartialState()
        if state.process_index == 1:
            raise KeyError("lost")
        state.wait_for_everyone()

    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"--- rank 1\n[^-]*KeyError: 'lost'"):
        run_ranks(2, fails, timeout_s=150)
    assert time.monotonic() - started < 100

    with pytest.raises(RankFailure, match=r"--- rank 0\nno result within 1 s"):
        run_ranks(1, lambda: time.sleep(60), timeout_s=1)
    with pytest.raises(RankFailure, match="where or its arguments cannot be pickled for another process"):
        run_ranks(1, where, threading.Lock())


# ---- a clean state


def test_reset_forgets_the_context_and_its_settings():
    first = Accelerator(mixed_precision="bf16")
    reset()
    second = Accelerator(mixed_precision="no")
    assert second.ctx is not first.ctx


def test_an_isolated_block_leaves_nothing_behind(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    outer = Accelerator(mixed_precision="bf16").ctx
    with isolated():
        assert peek_context() is None
        os.environ["ORC_MIXED_PRECISION"] = "no"
        del os.environ["KEPT"]
        assert AcceleratorState().mixed_precision == "no"
        assert current_context() is not outer
    assert current_context() is outer
    assert os.environ["KEPT"] == "1"
    assert "ORC_MIXED_PRECISION" not in os.environ


def test_a_reset_ends_everything_that_watches_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("ORC_STALL_TIMEOUT_S", "60")
    monkeypatch.setenv("ORC_ATTEMPT_DIR", str(tmp_path))
    before = set(threading.enumerate())
    with isolated():
        model = torch.nn.Linear(1, 1)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader([1.0]))
        begun = set(threading.enumerate()) - before
    for thread in begun:
        thread.join(timeout=10)
    assert begun, "nothing watched the run"
    assert not [thread.name for thread in begun if thread.is_alive()]
