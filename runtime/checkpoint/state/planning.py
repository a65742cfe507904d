"""Plans of a sharded save: which rank writes which part of which tensor, agreed over the store.

Each rank says what it holds, mostly what all others have as well, and where its parts lie: some bytes for each tensor.
A rank that fails or does not come is an error with its name on all ranks, not a collective that hangs.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error
from orc.runtime.checkpoint.state.shard_metadata import ALIGNMENT, Array, Parts, flat, metadata_bytes

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
        self._digests: list[list[str]] = []
        self._layouts: dict[str, ShardLayout] = {}

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
        what = {folder: _kinds(plan) for folder, plan in plans.items()}
        where = {folder: _boxes(plan) for folder, plan in plans.items()}
        digests = [hashlib.sha256(json.dumps(bid, sort_keys=True).encode()).hexdigest() for bid in (what, where)]
        asked = self._barrier.hold("save_state (planning)", [error, digests, self._token], self._compare)
        if asked is not None:
            bid = [what if self._barrier.rank in asked else None, where]
            self._token = None
            self._token, self._chosen = self._barrier.hold("save_state (planning)", bid, self._decide, each=True)
        for folder, planner in planners.items():
            items = plans[folder].items
            if (positions := self._chosen[folder]) is not None:
                items = [items[position] for position in positions]
            self.values[folder] = [_value(planner, item) for item in items]
            self.lengths[folder] = []

    def report(self) -> dict[str, str]:
        """Return the `lengths`, as `metadata` takes them."""
        return {folder: _packed(lengths) for folder, lengths in self.lengths.items()}

    def metadata(self, reports: Sequence[Mapping[str, str]]) -> dict[str, bytes]:
        """Return the content of each folder's ``.metadata``, on rank 0, from the reports of all ranks."""
        return {
            folder: each.metadata(folder, [_unpacked(report[folder]) for report in reports])
            for folder, each in self._layouts.items()
        }

    def _compare(self, bids: list[Any]) -> list[int] | None:
        """Return `None` where all ranks know one decision, and would plan as for that.

        Otherwise the first ranks of those that hold the same: they say what.
        """
        agree_on_no_error([error for error, _, _ in bids])
        before, self._digests = self._digests, [digests for _, digests, _ in bids]
        if before != self._digests:
            self._token = None
        if self._token is not None and {token for _, _, token in bids} == {self._token}:
            return None
        first: dict[str, int] = {}
        for rank, (what, _) in enumerate(self._digests):
            first.setdefault(what, rank)
        return list(first.values())

    def _decide(self, bids: list[Any]) -> list[tuple[str, dict[str, list[int] | None]]]:
        """Return for each rank, and each folder, the positions in its own plan of what it writes; `None` for all."""
        self._layouts = {}  # those of a save that failed count no more
        known = {digests[0]: what for digests, (what, _) in zip(self._digests, bids, strict=True) if what is not None}
        held = [known[what] for what, _ in self._digests]
        if len(folders := {tuple(sorted(what)) for what in known.values()}) > 1:
            raise CheckpointError(f"the ranks have different sharded states to save: {sorted(folders)}")
        for folder in held[0]:
            try:
                plans = [(what[folder], where[folder]) for what, (_, where) in zip(held, bids, strict=True)]
                self._layouts[folder] = ShardLayout(plans)
            except ValueError as error:
                raise CheckpointError(f"{folder}: the parts of the ranks do not make up one state: {error}") from error
        token = secrets.token_hex(8)
        return [
            (token, {folder: each.chosen[rank] for folder, each in self._layouts.items()}) for rank in range(len(bids))
        ]


class ShardLayout:
    """What all ranks write of a folder, on rank 0.

    Args:
        plans: what each rank holds and where, as `_kinds` and `_boxes` say it; what ranks hold alike is one object.

    Attributes:
        chosen: for each rank the positions in its plan of what it writes; `None` for all.

    Raises:
        ValueError: the parts do not make up one state.
    """

    def __init__(self, plans: Sequence[tuple[list[Any], str]]) -> None:
        alike: dict[int, list[int]] = {}
        for rank, (what, _) in enumerate(plans):
            alike.setdefault(id(what), []).append(rank)
        self._paths: dict[str, Any] = {}
        held: dict[str, list[_Held]] = {}
        for ranks in alike.values():
            items, paths = plans[ranks[0]][0]
            for name, path in paths.items():
                self._paths.setdefault(name, tuple(path))
            # Rows of numbers, a column for each rank: those of one tensor lie side by side.
            boxes, row = np.stack([_unpacked(plans[rank][1]) for rank in ranks], axis=1), 0
            for position, (name, dtype, size) in enumerate(items):
                width = 2 * len(size)
                mine = _Held(dtype, tuple(size), np.array(ranks), position, boxes[row : row + width])
                held.setdefault(name, []).append(mine)
                row += width
        load = np.zeros(len(plans), np.int64)
        cuts: set[Any] = set()
        self._parts = [_written(name, own, load, cuts) for name, own in held.items()]
        kept = np.zeros((len(plans), max(len(items) for (items, _), _ in plans)), bool)
        for parts in self._parts:
            kept[parts.ranks, parts.positions] = True
        counts = kept.sum(1)
        self.chosen: list[list[int] | None] = [
            None if count == len(items) else np.flatnonzero(own).tolist()
            for own, count, ((items, _), _) in zip(kept, counts, plans, strict=True)
        ]
        numbers = np.cumsum(kept, 1) - 1 + (np.cumsum(counts) - counts)[:, None]  # of all values that are written
        self._numbers = [numbers[parts.ranks, parts.positions] for parts in self._parts]
        self._last: tuple[Array, bytes] | None = None

    def metadata(self, folder: str, lengths: Sequence[Array]) -> bytes:
        """Return the content of ``.metadata``, from the *lengths* of what each rank has written."""
        every = np.concatenate(lengths)
        if self._last is None or not np.array_equal(self._last[0], every):
            rooms = [-(-written // ALIGNMENT) * ALIGNMENT for written in lengths]
            begins = np.concatenate([np.cumsum(room) - room for room in rooms])
            stored = [
                (parts.ranks, begins[numbers], every[numbers])
                for parts, numbers in zip(self._parts, self._numbers, strict=True)
            ]
            files = [layout.shard_file(folder, rank).rpartition("/")[2] for rank in range(len(lengths))]
            self._last = every, metadata_bytes(self._parts, stored, self._paths, files)
        return self._last[1]


@dataclass(frozen=True)
class _Held:
    """A value at one position in the plans of some ranks, with the box of each in the whole tensor."""

    dtype: str | None
    size: tuple[int, ...]
    ranks: Array
    position: int
    boxes: Array

    def is_whole(self) -> bool:
        """Return whether each rank holds all of a tensor."""
        offsets, sizes = self.boxes[: len(self.size)], self.boxes[len(self.size) :]
        whole = np.array(self.size, np.int64)[:, None]
        return self.dtype is not None and not offsets.any() and bool((sizes == whole).all())


def _written(name: str, held: Sequence[_Held], load: Array, cuts: set[Any]) -> Parts:
    """Return the parts of a value, each of one rank: of those that hold it the one with the least *load*.

    The first of them for small tensors: whoever loads would have to open the files of all. *cuts* are those known of
    which nothing is held twice: most tensors of a model are cut as another one is.
    """
    dtype, size = held[0].dtype, held[0].size
    if any((other.dtype, other.size) != (dtype, size) for other in held):
        if not all(other.dtype == dtype and other.is_whole() for other in held):
            raise ValueError(f"{name} is of several kinds or sizes")
        held = held[:1]  # a buffer that each rank has for itself: that of the first is kept
    ranks = np.concatenate([each.ranks for each in held])
    positions = np.concatenate([np.full(len(each.ranks), each.position) for each in held])
    offsets, sizes = np.concatenate([each.boxes for each in held], axis=1).reshape(2, len(size), len(ranks))
    kind = None if dtype is None else getattr(torch, dtype.removeprefix("torch."))
    item = kind.itemsize if kind is not None else 0
    cut = size, ranks.tobytes(), offsets.tobytes(), sizes.tobytes()
    if cut not in cuts:
        whole = np.array(size, np.int64)[:, None]
        if offsets.min(initial=0) < 0 or sizes.min(initial=0) < 0 or (offsets + sizes > whole).any():
            raise ValueError(f"{name} has parts outside of it")
        busy = load[ranks] if math.prod(size) * item > _SMALL else np.zeros(len(ranks))
        places = flat(offsets, size)
        order = np.lexsort((ranks, busy, places))
        chosen = np.sort(order[np.append(True, np.diff(places[order]) != 0)])
        if not _fills(offsets[:, chosen], sizes[:, chosen], size):
            raise ValueError(f"the parts of {name} overlap, or are not all of it")
        if len(chosen) == len(ranks):
            cuts.add(cut)
        ranks, positions, offsets, sizes = ranks[chosen], positions[chosen], offsets[:, chosen], sizes[:, chosen]
    np.add.at(load, ranks, sizes.prod(0) * item)
    return Parts(name, kind, size, ranks, positions, offsets, sizes)


def _fills(offsets: Array, sizes: Array, whole: tuple[int, ...]) -> bool:
    """Return whether boxes are a tensor of the size *whole*, each element of it once.

    They are where the corners of all boxes, with alternating signs, are those of the whole: where the counts of boxes
    at each element have the same differences in every direction.
    """
    corners, signs, stride = np.zeros((1, offsets.shape[1] + 1), np.int64), np.ones((1, offsets.shape[1] + 1)), 1
    signs[0, -1] = -1  # the whole
    for length, low, size in zip(whole, offsets, sizes, strict=True):
        if low.any() or (size != length).any():
            low, high = np.append(low, 0), np.append(low + size, length)
            corners = np.vstack([corners + low * stride, corners + high * stride])
            signs = np.vstack([signs, -signs])
            stride *= length + 1
    _, where = np.unique(corners.ravel(), return_inverse=True)
    return math.prod(whole) == 0 or not np.bincount(where, signs.ravel()).any()


def _value(planner: DefaultSavePlanner, item: WriteItem) -> torch.Tensor | bytes:
    value = planner.resolve_data(item)
    return value.getvalue() if isinstance(value, io.BytesIO) else value.detach()


def _kinds(plan: SavePlan) -> list[Any]:
    """Return names, types and sizes of what *plan* saves, and the paths of the names."""
    items: list[Any] = []
    for item in plan.items:
        tensor = item.tensor_data
        kind: list[Any] = [None, []] if tensor is None else [str(tensor.properties.dtype), list(tensor.size)]
        items.append([item.index.fqn, *kind])
    return [items, plan.planner_data]


def _boxes(plan: SavePlan) -> str:
    """Return where the parts of tensors in *plan* lie: offsets and sizes of one after the other, packed."""
    chunks = [item.tensor_data.chunk for item in plan.items if item.tensor_data is not None]
    numbers = [number for chunk in chunks for number in (*chunk.offsets, *chunk.sizes)]
    return _packed(numbers)


def _packed(numbers: Sequence[int]) -> str:
    return base64.b64encode(zlib.compress(np.array(numbers, "<i8").tobytes(), 1)).decode()


def _unpacked(packed: str) -> Array:
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<i8")
