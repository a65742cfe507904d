"""Whole tensors in the place of shards."""

from __future__ import annotations

from typing import Any

import torch


def whole(data: Any) -> Any:
    """Return *data* (mappings, lists, tuples) with each DTensor gathered from its shards; all processes call it."""
    if isinstance(data, torch.Tensor):
        return data.full_tensor() if hasattr(data, "full_tensor") else data
    if isinstance(data, dict):
        # Of the same class, without calling its constructor: state dicts carry metadata in an attribute.
        found = data.copy()
        found.update((key, whole(value)) for key, value in data.items())
        return found
    if isinstance(data, (list, tuple)):
        return type(data)(whole(value) for value in data)
    return data
