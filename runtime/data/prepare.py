"""From the script's `DataLoader` to the loader of one rank."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from orc.runtime.core.availability import require_stateful_dataloader
from orc.runtime.data.adapter import DataLoaderAdapter
from orc.runtime.data.dispatch import DataLoaderDispatcher, SliceFunction
from orc.runtime.data.index_batches import CustomBatches, PassSampler, PlanBatches
from orc.runtime.data.iterable import IterableDatasetShard, MarkedCollate, Stream
from orc.runtime.data.loader import DataLoaderShard, is_stream, shares_itself
from orc.runtime.data.order import Order, SeededOrder, ShuffledOrder, share_in
from orc.runtime.data.plan import IndexPlan
from orc.runtime.data.position import Share
from orc.runtime.data.samplers import BatchSamplerShard, SeedableRandomSampler, fixed_batch_size
from orc.runtime.data.workers import WorkerStart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.context import RunContext

# Arguments of DataLoader that a prepared loader takes over unchanged.
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
_DATA_DIMENSIONS = ("dp", "dp_replicate", "dp_shard", "fsdp", "ddp")


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: SliceFunction | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: DeviceMesh | None = None,
    *,
    prefetch_to_device: bool = True,
    context: RunContext | None = None,
) -> DataLoaderAdapter:
    """Return a loader that yields this rank's share of *dataloader*'s batches.

    torch's sequential and random samplers become slices of one order that all ranks agree on, whatever their seeds.
    Samplers of the user's own are iterated on every rank, which then takes its batches (`BatchSamplerShard`). An
    iterable dataset is read on rank 0 and dispatched, or with ``dispatch_batches=False`` read on every rank. What is a
    rank's share already stays as it is: a dataset whose ``__orc_sharded__`` is true, a `DistributedSampler`.

    Of a stream made of shards (``num_shards`` and ``shard(num_shards, index)``, as Hugging Face datasets have them),
    read on every rank without *even_batches*, each rank reads its shards alone, where their number is a multiple of the
    ranks'.

    Args:
        dataloader: the loader to share; one that is prepared already is given back.
        device: where batches go with *put_on_device*; the context's by default.
        num_processes: shares to make; by default that of the topology (`Topology.data_size`).
        process_index: which of them is this one's, the topology's data rank by default.
        split_batches: a batch of *dataloader* is the global batch and is cut up; otherwise it is one rank's batch.
        put_on_device: move batches to *device*.
        rng_types: generators to align at the start of each pass.
        dispatch_batches: read on rank 0 and hand out; by default for iterable datasets.
        even_batches: fill up the end from the start, so that all ranks get equally many equal batches.
        slice_fn_for_dispatch: how dispatching cuts a batch.
        use_seedable_sampler: make a random sampler a `SeedableRandomSampler`.
        data_seed: its seed.
        non_blocking: copy to the device asynchronously; from pinned memory it always is.
        prefetch_to_device: copy to a CUDA device beside what it computes, on a stream of its own.
        use_stateful_dataloader: the loader is a torchdata `StatefulDataLoader` as well, which knows the state of a
            stream in worker processes, see `orc.runtime.data.backed`; all others have a position too.
        torch_device_mesh: ranks that differ in its data dimensions alone get different shares.
        context: the run; the current one by default.

    Raises:
        ValueError: batches that cannot be shared this way; the message says what to change.
        ImportError: *use_stateful_dataloader* without torchdata.
    """
    if isinstance(dataloader, DataLoaderAdapter):
        return dataloader
    if use_stateful_dataloader:
        require_stateful_dataloader()
    if context is None:
        from orc.runtime.core.context import current_context

        context = current_context()
    rank, world = context.topology.pin_data_share()
    everybody = world
    if torch_device_mesh is not None:
        world, rank = _data_place(torch_device_mesh)
    if num_processes is not None:
        world = num_processes
    if process_index is not None:
        rank = process_index
    if not 0 <= rank < world:
        raise ValueError(f"prepare_data_loader: process_index {rank} is not one of {world} processes, 0 to {world - 1}")
    # A share for another number of processes than there are: a rank by itself, with nobody to agree with.
    simulated = torch_device_mesh is None and world != everybody
    shared = _is_shared(dataloader, world)
    dispatch = is_stream(dataloader) if dispatch_batches is None else dispatch_batches
    dispatch = dispatch and world == everybody and not shared
    # Where rank 0 alone reads, it alone draws: the others would not come to agree on anything.
    share = share_in(context, simulated=simulated or dispatch)
    if shared and split_batches:
        raise ValueError(
            "split_batches: this loader's data is shared out to the ranks already, so its batches are one rank's; "
            "divide its batch_size by the number of processes and leave split_batches out"
        )
    generator = dataloader.generator if isinstance(dataloader.generator, torch.Generator) else None
    kept = _kept(dataloader)
    if use_stateful_dataloader and hasattr(dataloader, "snapshot_every_n_steps"):
        kept["snapshot_every_n_steps"] = dataloader.snapshot_every_n_steps
    if dispatch and context.distributed:
        kept.pop("generator", None)  # of the order alone: the seed of the workers comes from torch's, on all ranks
    if dataloader.num_workers > 0:
        kept["worker_init_fn"] = WorkerStart(dataloader.worker_init_fn)
    common: dict[str, Any] = {
        "device": (device or context.device) if put_on_device else None,
        "rng_types": rng_types,
        "non_blocking": non_blocking,
        "prefetch_to_device": prefetch_to_device,
        "context": context,
        **kept,
    }
    whole, dataset = dispatch or shared, dataloader.dataset
    if is_stream(dataloader) and world > 1 and not (whole or even_batches or split_batches):
        part = _shard(dataset, world, rank)
        if part is not None:
            whole, dataset = True, part
    shares, place = (1, 0) if whole else (world, rank)
    if is_stream(dataloader):
        common |= _stream(dataloader, dataset, shares, place, split_batches and not whole)
        common["synchronized_generator"] = getattr(dataset, "generator", None)
    else:
        sampler = _sampler(dataloader, use_seedable_sampler, data_seed)
        gives = getattr(sampler, "generator", 0) is None and shares > 1 and not use_seedable_sampler
        if gives:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(share(torch.empty((), dtype=torch.int64).random_()).item()))
        passes = _passes(dataloader, shares, place, split_batches and not whole, even_batches, sampler, share)
        passes.given_generator = gives
        common |= {"dataset": dataloader.dataset}
        common |= {"sampler": passes, "batch_size": None} if _unbatched(dataloader) else {"batch_sampler": passes}
        common["synchronized_generator"] = generator
    rows = _batch_size(dataloader) or 1
    if dispatch:
        dispatcher = DataLoaderDispatcher(
            total_batch_size=rows,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            drops_last=dataloader.drop_last,
            use_stateful_dataloader=use_stateful_dataloader,
            **common,
        )
        dispatcher.__dict__["drop_last"] = dataloader.drop_last
        return dispatcher
    loader = DataLoaderShard(
        world_size=world,
        total_batch_size=rows if split_batches else rows * world,
        use_stateful_dataloader=use_stateful_dataloader,
        **common,
    )
    loader.simulated, loader.own_share = simulated, whole
    # As it was given: torch keeps it from being set, and its own reading of it is over with a batch sampler.
    loader.__dict__["drop_last"] = dataloader.drop_last
    return loader


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoaderAdapter:
    """Return a loader like *dataloader* whose passes leave out, and do not read, the first *num_batches* batches.

    Counts from the start of the epoch: after `load_state` it takes the place of the restored position, so that a
    script that keeps its own count skips once, not twice.

    Raises:
        ValueError: *num_batches* is negative.
    """
    if num_batches < 0:
        raise ValueError(f"skip_first_batches: {num_batches} batches cannot be skipped")
    if not isinstance(dataloader, DataLoaderAdapter):
        dataloader = prepare_data_loader(  # type: ignore[assignment]
            dataloader, num_processes=1, process_index=0, dispatch_batches=False
        )
    assert isinstance(dataloader, DataLoaderAdapter)
    return dataloader.skipping(num_batches)


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """Return a loader like *loader* with batches of *batch_size* samples.

    Raises:
        ValueError: its batches are made by a sampler of the script's own, or it has none.
    """
    if loader.batch_size == batch_size:
        return loader
    if loader.batch_size is None or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ValueError(
            "the batches of this loader are made by a sampler of their own, so that their size cannot be changed to "
            f"{batch_size}: give the DataLoader a batch_size instead of a batch_sampler"
        )
    kept = _kept(loader)
    if not is_stream(loader):
        kept["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=batch_size, drop_last=loader.drop_last, **kept)


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    known = inspect.signature(DataLoader.__init__).parameters  # of this torch
    return {name: getattr(loader, name) for name in _KEPT if name in known and hasattr(loader, name)}


def _data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Number of data shares of *mesh*, and this rank's."""
    names = mesh.mesh_dim_names
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not part of torch_device_mesh")
    world, rank = 1, 0
    for dimension, (size, index) in enumerate(zip(mesh.mesh.shape, coordinate, strict=True)):
        if names is None or names[dimension] in _DATA_DIMENSIONS:
            world, rank = world * size, rank * size + index
    return world, rank


def _is_shared(dataloader: DataLoader[Any], world: int) -> bool:
    """Return whether *dataloader* already reads one rank's share and needs no cutting."""
    sampler = getattr(dataloader.batch_sampler, "sampler", getattr(dataloader, "sampler", None))
    distributed = isinstance(sampler, DistributedSampler) and sampler.num_replicas == world
    return world > 1 and (distributed or shares_itself(dataloader.dataset))


def _unbatched(dataloader: DataLoader[Any]) -> bool:
    return dataloader.batch_sampler is None


def _batches(dataloader: DataLoader[Any]) -> Any:
    """The batch sampler of *dataloader*, also one given as ``sampler`` with ``batch_size=None``; or `None`."""
    if dataloader.batch_sampler is not None:
        return dataloader.batch_sampler
    return dataloader.sampler if getattr(dataloader.sampler, "batch_size", None) else None


def _batch_size(dataloader: DataLoader[Any]) -> int | None:
    return dataloader.batch_size or fixed_batch_size(_batches(dataloader))


def _shard(dataset: Any, world: int, rank: int) -> Any | None:
    """The shards of *dataset* that are for *rank* alone; `None` where they cannot be dealt out evenly."""
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    if not isinstance(count, int) or not callable(getattr(dataset, "shard", None)) or count < 1 or count % world:
        return None
    return dataset.shard(num_shards=world, index=rank)


def _stream(dataloader: DataLoader[Any], dataset: Any, world: int, rank: int, split: bool) -> dict[str, Any]:
    size = dataloader.batch_size or 1
    shard = IterableDatasetShard(dataset, size, dataloader.drop_last, world, rank, split)
    arguments: dict[str, Any] = {"dataset": Stream(shard), "drop_last": dataloader.drop_last}
    arguments["batch_size"] = None if dataloader.batch_size is None else shard.rows
    if world > 1:
        arguments["collate_fn"] = MarkedCollate(dataloader.collate_fn)
    return arguments


def _sampler(dataloader: DataLoader[Any], seedable: bool, data_seed: int | None) -> Any:
    """The sampler to share out."""
    sampler: Any = getattr(_batches(dataloader), "sampler", dataloader.sampler)
    if seedable and type(sampler) is RandomSampler:
        return SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
            data_seed=data_seed,
        )
    return sampler


def _order(sampler: Any) -> Order | None:
    """The known order of *sampler*; `None` for the user's own. A subclass may yield anything."""
    if type(sampler) is SequentialSampler and isinstance(sampler.data_source, Sized):
        return Order(len(sampler.data_source))
    if type(sampler) is RandomSampler:
        return ShuffledOrder(sampler)
    if type(sampler) is SeedableRandomSampler:
        return SeededOrder(sampler)
    return None


def _passes(
    dataloader: DataLoader[Any], world: int, rank: int, split: bool, even: bool, sampler: Any, share: Share
) -> PassSampler:
    batch_sampler: Any = _batches(dataloader)
    known = type(batch_sampler) is BatchSampler or batch_sampler is None
    order = _order(sampler) if known else None
    if batch_sampler is None:
        if split:
            raise ValueError("split_batches needs batches to split: give the DataLoader a batch_size")
        if order is None:
            if world > 1:
                raise ValueError(
                    f"a DataLoader with batch_size=None and a sampler of its own ({type(sampler).__name__}) cannot be "
                    "shared out over processes: pass it as batch_sampler, or give a batch_size"
                )
            return CustomBatches(BatchSamplerShard(sampler, even_batches=False), share, 1)
        plan = IndexPlan(len(order), 1, world, even_batches=even)
        return PlanBatches(plan, order, rank, share, sampler=sampler, single=True)
    if order is not None:
        size, drop = batch_sampler.batch_size, batch_sampler.drop_last
        plan = IndexPlan(len(order), size, world, split, drop, even)
        return PlanBatches(plan, order, rank, share, sampler=sampler)
    shard = BatchSamplerShard(batch_sampler, world, rank, split, even and world > 1)
    return CustomBatches(shard, share, world)
