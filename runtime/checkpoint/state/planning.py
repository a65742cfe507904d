"""Plans of a sharded save: which rank writes which part of which tensor, agreed in one barrier.

torch's planners decide; what they need of each other travels as JSON over the store, so that a rank that fails or does
not come is an error with its name on all ranks, not a collective that hangs.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import io
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from orc.runtime.checkpoint.state.shard_files import metadata_bytes, with_lengths

_SMALL = 64 * 1024  # bytes; what many ranks hold alike and is no larger, the first of them writes


class ShardPlans:
    """Plans of the sharded saves of a series of barriers, by folder.

    They stay as long as every rank would plan the same again: then the ranks exchange a few bytes instead.

    Attributes:
        values: what this rank writes: tensors, which may be views of those in training, and pickled values.
        lengths: bytes of each value, once it is written.
    """

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier
        self.values: dict[str, list[torch.Tensor | bytes]] = {}
        self.lengths: dict[str, list[int]] = {}
        self._token: str | None = None  # of the decision that this rank knows
        self._chosen: dict[str, list[int] | None] = {}
        # On rank 0:
        self._digests: list[str] = []
        self._items: dict[str, list[list[WriteItem]]] = {}  # of all ranks, until there is a content
        self._metadata: dict[str, Metadata] = {}
        self._contents: dict[str, tuple[list[list[int]], bytes]] = {}  # lengths, and the ``.metadata`` of them

    def agree(self, states: Mapping[str, dict[str, Any]], error: str | None) -> None:
        """Decide who writes what of *states* (by folder); every rank comes, with its *error* if it has one.

        Raises:
            CheckpointError: on every rank, one has an error or does not come, or the states do not belong together.
        """
        self.values, self.lengths = {}, {}
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
        bid = {folder: _encoded(plan) for folder, plan in plans.items()} if error is None else {}
        digest = hashlib.sha256(json.dumps(bid, sort_keys=True).encode()).hexdigest()
        if not self._barrier.hold("save_state (planning)", [error, digest, self._token], self._as_before):
            self._token = None
            with _uncollected():
                self._token, self._chosen = self._barrier.hold("save_state (planning)", bid, self._decide, each=True)
        for folder, planner in planners.items():
            items = plans[folder].items
            if (positions := self._chosen[folder]) is not None:
                items = [items[position] for position in positions]
            self.values[folder] = [_value(planner, item) for item in items]
            self.lengths[folder] = []

    def metadata(self, lengths: Sequence[Mapping[str, list[int]]]) -> dict[str, bytes]:
        """Return the content of each folder's ``.metadata``, on rank 0, from the *lengths* of all ranks."""
        with _uncollected():
            for folder in self._items.keys() | self._contents.keys():
                written = [one[folder] for one in lengths]
                if folder in self._items:
                    content = metadata_bytes(folder, self._metadata[folder], self._items[folder], written)
                    del self._metadata[folder], self._items[folder]
                elif self._contents[folder][0] != written:
                    content = with_lengths(self._contents[folder][1], folder, written)
                else:
                    continue
                self._contents[folder] = written, content
        return {folder: content for folder, (_, content) in self._contents.items()}

    def _as_before(self, bids: list[Any]) -> bool:
        """Return whether all ranks know one decision, and would plan as for that."""
        agree_on_no_error([error for error, _, _ in bids])
        before, self._digests = self._digests, [digest for _, digest, _ in bids]
        if before != self._digests:
            self._token = None
        return self._token is not None and {token for _, _, token in bids} == {self._token}

    def _decide(self, bids: list[Any]) -> list[tuple[str, dict[str, list[int] | None]]]:
        """Return for each rank, and each folder, the positions in its own plan of what it writes; `None` for all."""
        folders = {tuple(sorted(plans)) for plans in bids}
        if len(folders) > 1:
            raise CheckpointError(f"the ranks have different sharded states to save: {sorted(folders)}")
        chosen: list[dict[str, list[int] | None]] = [{} for _ in bids]
        self._items, self._metadata, self._contents = {}, {}, {}  # those of a save that failed count no more
        for folder in list(bids[0]):
            known: dict[Any, Any] = {}
            local = [_decoded(plans.pop(folder), known) for plans in bids]
            try:
                final, metadata = DefaultSavePlanner().create_global_plan(_small_once(local))
            except (ValueError, AssertionError) as error:
                raise CheckpointError(f"{folder}: the parts of the ranks do not make up one state: {error}") from error
            for mine, before, plan in zip(chosen, local, final, strict=True):
                mine[folder] = None
                if len(plan.items) < len(before.items):
                    positions = {item.index: position for position, item in enumerate(before.items)}
                    mine[folder] = [positions[item.index] for item in plan.items]
            self._items[folder] = [plan.items for plan in final]
            self._metadata[folder] = metadata
        token = secrets.token_hex(8)
        return [(token, mine) for mine in chosen]


def _small_once(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return *plans* in which small parts that several have are those of the first.

    torch's planner would spread them over the files of all ranks, and who loads would have to open them all.
    """
    known: set[MetadataIndex] = set()
    kept = []
    for plan in plans:
        items = []
        for item in plan.items:
            if (item.tensor_storage_size() or 0) > _SMALL:
                items.append(item)
            elif item.index not in known:
                known.add(item.index)
                items.append(item)
        kept.append(dataclasses.replace(plan, items=items))
    return kept


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from looking through millions of new objects again and again, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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


def _decoded(encoded: list[Any], known: dict[Any, Any]) -> SavePlan:
    """Return the plan of one rank; *known* has what those of all ranks have in common once."""

    def once(value: Any) -> Any:
        return known.setdefault(value, value)

    items = []
    for kind, name, offset, number, chunk in encoded[0]:
        name, tensor = once(name), None
        if chunk is not None:
            dtype, size, offsets, sizes = chunk
            if dtype not in known:
                torch_type = cast(torch.dtype, getattr(torch, dtype.removeprefix("torch.")))
                known[dtype] = TensorProperties(dtype=torch_type)
            tensor = TensorWriteData(
                ChunkStorageMetadata(torch.Size(offsets), once(torch.Size(sizes))), known[dtype], once(torch.Size(size))
            )
        items.append(WriteItem(MetadataIndex(name, offset, number), WriteItemType[kind], tensor_data=tensor))
    return SavePlan(items, planner_data={once(name): once(tuple(path)) for name, path in encoded[1].items()})
