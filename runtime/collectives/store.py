"""The store: keys and values that the ranks of one run leave for each other, read and written by its ranks alone.

torch's store answers whoever can connect to it. What orc's ranks agree on by themselves (where to stop, whether a
save is complete, who stalls) decides about the run, so it goes over a store instead: a dictionary in rank 0's process,
which `store_server` serves to the others.

Nothing here needs torch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from orc.runtime.core.errors import OrcRuntimeError

ANSWER_S = 60.0  # how long rank 0's interpreter may be busy with something else
_ATTENTIVE = 128  # ranks that may look as often as they like


def pace(world_size: int) -> float:
    """Return how many times longer the ranks of a large run wait between looks, so that rank 0 keeps up."""
    return max(1.0, world_size / _ATTENTIVE)


_series: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # by process group, which has one store


def series(context: object) -> Counter[str]:
    """Return how many users of each name the store of *context* has had.

    Another run on the same store, as after `free_memory` or `testing.reset`, must not find what the one before has left
    there: the names of its keys carry the next number, which is the same on all ranks.
    """
    return _series.setdefault(getattr(context, "group", None) or context, Counter())


def next_name(context: object, name: str) -> str:
    """Return ``name/number`` with the next number of *name* on the store of *context*."""
    numbers = series(context)
    numbers[name] += 1
    return f"{name}/{numbers[name]}"


class StoreError(OrcRuntimeError):
    """The store is gone, or its server has another key than this run."""


class StoreTimeout(StoreError):
    """A key was not written in time, or the store did not answer in time."""


class Store(Protocol):
    """Operations of the ranks on the store. Every thread that may wait takes a `clone` for itself."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write *value*, in place of the one that is there."""
        ...

    def get(self, key: str) -> bytes:
        """The value; waits for a while until there is one. Raises `StoreTimeout`."""
        ...

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values; waits as `get` does."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to the number that is there, 0 at first, and return the sum."""
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all are there."""
        ...

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Return when all are there. Raises `StoreTimeout`."""
        ...

    def delete_key(self, key: str) -> bool:
        """Remove it; whether it was there."""
        ...

    def clone(self, answer_s: float = ANSWER_S) -> Store:
        """The same store over a connection of its own; *answer_s*: how long an answer may take, in seconds."""
        ...


class LocalStore:
    """The dictionary itself, for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        """See `Store`."""
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """See `Store`."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `Store`."""
        with self._changed:
            self._await(keys, ANSWER_S)
            return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        """See `Store`."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store`."""
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """See `Store`."""
        with self._changed:
            self._await(keys, timeout.total_seconds())

    def _await(self, keys: Sequence[str], seconds: float) -> None:
        if not self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds):
            missing = [key for key in keys if key not in self._values]
            raise StoreTimeout(f"nobody has written {', '.join(missing[:3])} within {seconds:g} s")

    def delete_key(self, key: str) -> bool:
        """See `Store`."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def list_keys(self) -> list[str]:
        """The keys that are there."""
        with self._changed:
            return sorted(self._values)

    def clone(self, answer_s: float = ANSWER_S) -> LocalStore:
        """Itself: threads share it."""
        return self
