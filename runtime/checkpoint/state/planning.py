"""Plans of a sharded save: which rank writes which part of which tensor, agreed in one barrier.

torch's planners decide; what they need of each other travels as JSON over the store, so that a rank that fails or does
not come is an error with its name on all ranks, not a collective that hangs.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error
from orc.runtime.checkpoint.state.shard_files import metadata_bytes


class ShardPlans:
    """Plans of one save, by folder.

    Attributes:
        values: what this rank writes: tensors, which may be views of those in training, and pickled values.
        lengths: bytes of each value, once it is written.
    """

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier
        self.values: dict[str, list[torch.Tensor | bytes]] = {}
        self.lengths: dict[str, list[int]] = {}
        self._items: dict[str, list[list[WriteItem]]] = {}  # of all ranks, on rank 0
        self._metadata: dict[str, Metadata] = {}

    def agree(self, states: Mapping[str, dict[str, Any]], error: str | None) -> None:
        """Decide who writes what of *states* (by folder); every rank comes, with its *error* if it has one.

        Raises:
            CheckpointError: on every rank, one has an error or does not come, or the states do not belong together.
        """
        planners: dict[str, DefaultSavePlanner] = {}
        plans: dict[str, SavePlan] = {}
        if error is None:
            try:
                for folder, state in states.items():
                    planners[folder] = DefaultSavePlanner()
                    planners[folder].set_up_planner(state, is_coordinator=self._barrier.rank == 0)
                    plans[folder] = planners[folder].create_local_plan()
            except Exception as failure:  # noqa: BLE001 - raised on every rank by the barrier
                error = f"{type(failure).__name__}: {failure}"
        bid = [error, {folder: _encoded(plan) for folder, plan in plans.items()} if error is None else {}]
        chosen = self._barrier.hold("save_state (planning)", bid, self._decide)
        for folder, planner in planners.items():
            items = [plans[folder].items[position] for position in chosen[folder][self._barrier.rank]]
            self.values[folder] = [_value(planner, item) for item in items]
            self.lengths[folder] = []

    def metadata(self, lengths: Sequence[Mapping[str, list[int]]]) -> dict[str, bytes]:
        """Return the content of each folder's ``.metadata``, on rank 0, from the *lengths* of all ranks."""
        return {
            folder: metadata_bytes(folder, self._metadata[folder], items, [one[folder] for one in lengths])
            for folder, items in self._items.items()
        }

    def _decide(self, bids: list[Any]) -> dict[str, list[list[int]]]:
        """Return for each folder the positions in its own plan of what each rank writes."""
        agree_on_no_error([error for error, _ in bids])
        folders = {tuple(sorted(plans)) for _, plans in bids}
        if len(folders) > 1:
            raise CheckpointError(f"the ranks have different sharded states to save: {sorted(folders)}")
        chosen: dict[str, list[list[int]]] = {}
        for folder in bids[0][1]:
            local = [_decoded(plans[folder]) for _, plans in bids]
            try:
                final, metadata = DefaultSavePlanner().create_global_plan(local)
            except (ValueError, AssertionError) as error:
                raise CheckpointError(f"{folder}: the parts of the ranks do not make up one state: {error}") from error
            positions = [{item.index: position for position, item in enumerate(plan.items)} for plan in local]
            chosen[folder] = [
                [known[item.index] for item in plan.items] for known, plan in zip(positions, final, strict=True)
            ]
            self._items[folder] = [plan.items for plan in final]
            self._metadata[folder] = metadata
        return chosen


def _value(planner: DefaultSavePlanner, item: WriteItem) -> torch.Tensor | bytes:
    value = planner.resolve_data(item)
    return value.getvalue() if isinstance(value, io.BytesIO) else value.detach()


def _encoded(plan: SavePlan) -> list[Any]:
    items = []
    for item in plan.items:
        offset = None if item.index.offset is None else list(item.index.offset)
        tensor = item.tensor_data
        chunk = None
        if tensor is not None:
            place = tensor.chunk
            chunk = [str(tensor.properties.dtype), list(tensor.size), list(place.offsets), list(place.sizes)]
        items.append([item.type.name, item.index.fqn, offset, item.index.index, chunk])
    return [items, plan.planner_data]


def _decoded(encoded: list[Any]) -> SavePlan:
    items = []
    for kind, name, offset, number, chunk in encoded[0]:
        tensor = None
        if chunk is not None:
            dtype, size, offsets, sizes = chunk
            tensor = TensorWriteData(
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                TensorProperties(dtype=cast(torch.dtype, getattr(torch, dtype.removeprefix("torch.")))),
                torch.Size(size),
            )
        items.append(WriteItem(MetadataIndex(name, offset, number), WriteItemType[kind], tensor_data=tensor))
    return SavePlan(items, planner_data={name: tuple(path) for name, path in encoded[1].items()})
