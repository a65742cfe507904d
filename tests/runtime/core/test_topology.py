"""How ranks are laid out, which share of the data each gets, and what is refused."""

import pytest

from orc.runtime.core.context import RunContext
from orc.runtime.core.errors import ContextError, TopologyError
from orc.runtime.testing import run_threads


def layout(rank, world_size, sizes):
    return RunContext.fake(rank, world_size).set_topology(sizes, by="test")


def test_all_ranks_are_replicas_until_something_else_is_chosen():
    topology = RunContext.fake(2, 4).topology
    assert topology.sizes == {"pp": 1, "dp_replicate": 4, "dp_shard": 1, "cp": 1, "sp": 1, "tp": 1}
    assert (topology.pin_data_share(), topology.counts, topology.peers) == ((2, 4), True, 1)
    assert str(topology) == "dp_replicate 4"
    assert str(RunContext.fake().topology) == "one rank"


@pytest.mark.parametrize(
    ("sizes", "places", "counting"),
    [
        ({"dp_shard": 4}, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({"dp_replicate": 2, "dp_shard": 2}, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({"dp_replicate": 2, "tp": 2}, [0, 0, 1, 1], [0, 2]),
        ({"pp": 2, "dp_shard": 2}, [0, 1, 0, 1], [0, 1]),
        ({"tp": 2, "cp": 2}, [0, 0, 0, 0], [0]),
    ],
)
def test_ranks_that_differ_in_no_data_dimension_share_a_batch_and_one_counts(sizes, places, counting):
    seen = [layout(rank, 4, sizes) for rank in range(4)]
    assert [one.data_rank for one in seen] == places
    assert [rank for rank, one in enumerate(seen) if one.counts] == counting
    assert all(one.data_size * one.peers == 4 for one in seen)


def test_the_outermost_dimension_is_the_slowest():
    topology = layout(13, 16, {"tp": 2, "cp": 2, "dp_shard": 2, "dp_replicate": 2})  # 13 is 1101
    assert [topology.place(dim) for dim in ("dp_replicate", "dp_shard", "cp", "tp")] == [1, 1, 0, 1]
    assert topology.data_rank == 3
    assert topology.size("dp_replicate", "dp_shard", "cp") == 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, r"test: tp 3 makes 3 ranks, but the run has 4"),
        ({"dp_shard": 8}, "launch 8 processes"),
        ({"tp": 0}, "tp is 0"),
        ({"tp": True}, "tp is True"),
        ({"experts": 4}, "no dimension 'experts'"),
        ({}, "every dimension 1 makes 1 ranks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_alike_on_every_rank(sizes, message):
    texts = set()
    for rank in range(4):
        with pytest.raises(TopologyError, match=message) as refused:
            layout(rank, 4, sizes)
        texts.add(str(refused.value))
    assert len(texts) == 1


def test_it_is_chosen_once():
    ctx = RunContext.fake(0, 4)
    first = ctx.set_topology({"dp_shard": 4}, by="fsdp_plugin")
    assert ctx.set_topology({"dp_shard": 4, "tp": 1}, by="parallelism_config") is first is ctx.topology
    with pytest.raises(ContextError, match=r"parallelism_config .*dp_shard 2 x tp 2, but fsdp_plugin .* dp_shard 4"):
        ctx.set_topology({"dp_shard": 2, "tp": 2}, by="parallelism_config")
    ctx.unconfigure()
    assert ctx.set_topology({"dp_shard": 2, "tp": 2}, by="parallelism_config").data_size == 2


def test_what_loaders_rely_on_already_does_not_change():
    ctx = RunContext.fake(0, 4)
    assert ctx.topology.pin_data_share() == (0, 4)
    with pytest.raises(ContextError, match="share the data out over 4 ranks"):
        ctx.set_topology({"dp_shard": 2, "tp": 2}, by="parallelism_config")
    assert ctx.set_topology({"dp_shard": 4}, by="fsdp_plugin").data_size == 4


def test_simulated_ranks_have_groups_along_each_dimension():
    import torch
    import torch.distributed as dist

    from orc.runtime.core.context import current_context

    def sums():
        ctx = current_context()
        topology = ctx.set_topology({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, by="test")
        found = []
        for dims in (("tp",), ("dp_shard",), ("dp_replicate", "dp_shard"), ("dp_replicate", "tp")):
            total = torch.tensor(2**ctx.rank)
            dist.all_reduce(total, group=topology.group(*dims))
            found.append(int(total))
        assert topology.group("cp") is None
        assert topology.group("tp") is topology.group("tp")
        assert topology.group("tp", "dp_replicate", "dp_shard") is ctx.group
        with pytest.raises(ContextError, match="simulated"):
            _ = topology.mesh
        return found

    bits = [[0b11, 0b101, 0b1010101, 0b110011], [0b11, 0b1010, 0b10101010, 0b110011]]
    assert run_threads(8, sums)[:2] == bits


def test_a_rank_that_fails_ends_those_that_wait_in_a_smaller_group():
    import torch
    import torch.distributed as dist

    from orc.runtime.core.context import current_context

    def fail():
        ctx = current_context()
        group = ctx.set_topology({"dp_replicate": 2, "tp": 2}, by="test").group("tp")
        if ctx.rank == 3:
            raise OSError("disk")
        dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(OSError, match="disk"):
        run_threads(4, fail)


def test_real_ranks_share_one_mesh(run_ranks):
    def live():
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from orc.runtime import PartialState
        from orc.runtime.core.topology import Topology

        ctx = PartialState().ctx
        topology = ctx.set_topology({"dp_replicate": 2, "tp": 2}, by="test")
        assert topology.mesh is topology.mesh
        assert topology.mesh.mesh_dim_names == ("dp_replicate", "tp")
        assert topology.submesh("tp").size() == 2
        assert topology.group("tp") is topology.mesh.get_group("tp")
        own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))  # in another order
        brought = Topology(ctx, mesh=own, by="the script")
        found = []
        for one, dims in ((topology, ("dp_replicate",)), (brought, ("dp_replicate",)), (brought, ("tp",))):
            total = torch.tensor(2**ctx.rank)
            dist.all_reduce(total, group=one.group(*dims))
            found.append(int(total))
        assert brought.submesh("dp_replicate").size() == 2
        assert not brought.same(topology)
        wide = Topology(ctx, {"pp": 1, "dp_replicate": 2, "cp": 1, "dp_shard": 2}, by="test")
        assert wide.names == ("pp", "dp_replicate", "dp_shard", "cp")
        return found, brought.data_rank, [brought._ranks_of_groups(("tp",)), topology._ranks_of_groups(("tp",))]

    first, second, third, last = run_ranks(4, live)
    assert first == ([0b0101, 0b0011, 0b0101], 0, [[[0, 2], [1, 3]], [[0, 1], [2, 3]]])
    assert [one[1] for one in (first, second, third, last)] == [0, 1, 0, 1]


def test_one_process_opens_a_group_of_its_own_for_a_mesh(run_ranks):
    def live():
        import torch.distributed as dist

        from orc.runtime import Accelerator

        accelerator = Accelerator(cpu=True)
        mesh = accelerator.ctx.set_topology({"dp_shard": 1}, by="fsdp_plugin").mesh
        opened = dist.is_initialized()
        accelerator.end_training()
        return mesh.mesh_dim_names, mesh.size(), opened, dist.is_initialized()

    assert run_ranks(1, live) == [(("dp_shard",), 1, True, False)]


def test_groups_beside_that_of_all_ranks_have_the_time_out_that_was_asked_for(run_ranks):
    def live(own):
        from datetime import timedelta

        import torch.distributed as dist

        from orc.runtime import PartialState
        from orc.runtime.launch import process_group

        if own:  # as with nccl: nothing carries tensors on the CPU
            dist.init_process_group("cuda:gloo", timeout=timedelta(seconds=77))
            process_group._run_store = dist.group.WORLD, (None, b"k" * 32)  # it would be found over the GPUs
        ctx = PartialState(cpu=True).ctx
        groups = [ctx.control_group("this test")]
        if not own:
            topology = ctx.set_topology({"dp_replicate": 2, "dp_shard": 2}, by="this test")
            groups += topology.mesh.get_all_groups()
            groups += [
                topology.group("dp_replicate", "dp_shard"),
                topology.joined("dp_replicate", "dp_shard").get_group(),
            ]
        return {group._get_backend(group._device_types[0]).options._timeout.total_seconds() for group in groups}

    assert run_ranks(4, live, False, env={"ORC_TIMEOUT_S": "77"}) == [{77}] * 4
    assert run_ranks(2, live, True) == [{77}] * 2
    assert run_ranks(4, live, False) == [{1800}] * 4
