"""Prepared loaders that read with torchdata's `StatefulDataLoader` (``use_stateful_dataloader=True``).

Which samples come next is decided as in every prepared loader. What torchdata adds is the state of a stream that has
one (``state_dict`` and ``load_state_dict``) also where worker processes read it: it becomes part of the position.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from orc.runtime.core.availability import require_stateful_dataloader
from orc.runtime.data.iterable import Stream


class _Reader:
    """torchdata's side of a loader: where its iterator, and the streams in its workers, are."""

    kind = "torchdata"

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        """The state after the batch that was read last."""
        state: dict[str, Any] = self.loader._iterator.state_dict()
        return {"workers": self.loader.num_workers, "reader": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator begin from *state*."""
        self.loader.next_iter_state = state["reader"]

    def takes(self, state: Mapping[str, Any]) -> bool:
        """Return whether *state* is of as many workers as there are now."""
        return bool(state["workers"] == self.loader.num_workers)


class Backed:
    """Part of a prepared loader that reads with torchdata."""

    dataset: Any
    own_share: bool

    def _stateful(self) -> Any:
        if not isinstance(self.dataset, Stream) or self.own_share:
            return None
        inner = self.dataset.dataset
        return _Reader(self) if hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict") else None


@functools.cache
def backed(kind: Any) -> Any:
    """Return the subclass of *kind* that is a `StatefulDataLoader` as well. Raises `ImportError` without torchdata."""
    require_stateful_dataloader()
    from torchdata.stateful_dataloader import StatefulDataLoader

    bases, module = (Backed, kind, StatefulDataLoader), "orc.runtime.data.stateful"
    return type(f"Stateful{kind.__name__}", bases, {"__module__": module, "__doc__": kind.__doc__})
