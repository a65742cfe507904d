"""Optimizers of DTensors beside plain tensors: torch's operations on lists (``foreach``, ``fused``) take one kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def by_mesh(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Return *tensors* by the mesh over which they are cut, in their order; plain ones have none."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return kinds


@contextmanager
def groups_of_one_kind(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which *optimizer* sees a parameter group of several kinds as one group of each, with equal options.

    Outside of it the groups are those of the script, as its states and schedulers know them. Optimizers that take
    their parameters one by one see no other groups.
    """
    groups = optimizer.param_groups
    pieces: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what the optimizer sees, and of which group it is
    for group in groups:
        kinds = by_mesh(group["params"]) if "foreach" in group or "fused" in group else {}
        seen = [{**group, "params": params} for params in kinds.values()] if len(kinds) > 1 else [group]
        pieces.extend((piece, group) for piece in seen)
    if len(pieces) == len(groups):
        yield
        return
    optimizer.param_groups = [piece for piece, _ in pieces]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for piece, group in pieces:  # some optimizers count in their groups
            group.update({name: value for name, value in piece.items() if name != "params"})
