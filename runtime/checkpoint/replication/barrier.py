"""Barriers: the ranks of a save or load agree over the store, with a time-out that names the missing ranks.

A collective would hang when one rank does not come, and its error would name no rank. A barrier costs two small
messages per rank. A save asks on the way whether those who are missing can come at all (`absence`).
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from orc.runtime.checkpoint.errors import CheckpointError, RankMissing, RanksElsewhere
from orc.runtime.core.store import ANSWER_S, StoreError, StoreTimeout, next_name, series

if TYPE_CHECKING:
    from orc.runtime.checkpoint.replication.absence import Absence
    from orc.runtime.checkpoint.replication.relay import Relay
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.store import Store

Verdict = Callable[[list[Any]], Any]
T = TypeVar("T")
PATIENCE_S = 600.0
READERS_S = 5.0
_VERDICT_S = 5.0  # beyond the time-out, in which rank 0 tells who has not come


class Barrier:
    """The barriers of one process with its peers, in the same order on all of them.

    timeout_s:
        How long to wait for ranks that have not come, in seconds.
    name:
        Of this series of barriers; series of different names run beside each other, each in a thread of its own. Those
        of one name are told apart by their order, which is the same on all ranks.
    """

    def __init__(self, context: RunContext, timeout_s: float | None = None, name: str = "barrier") -> None:
        self.rank = context.rank
        self.world_size = context.world_size
        self.timeout_s = timeout_s or context.config.timeout_s or PATIENCE_S
        self._given = context.store
        self._series = series(context)
        self._name = next_name(context, name)
        self._store: Store | None = None
        self._count = 0
        self._relays = 0
        self._runs_apart = bool(context.key)  # each rank in a process of its own
        self.kept: dict[type, Any] = {}  # by its callers, from one barrier to the next

    def hold(
        self,
        what: str,
        value: Any,
        verdict: Verdict,
        *,
        timeout_s: float | None = None,
        absence: Absence | None = None,
        each: bool = False,
    ) -> Any:
        """Every rank brings *value* (JSON-able); rank 0 applies *verdict* to all values; every rank gets its result.

        *verdict* raises `CheckpointError` to make every rank raise it. With *absence* ranks that cannot come are not
        waited for. With *each* the verdict is a list, of which every rank gets the element that is its own.

        Raises:
            RanksElsewhere: with *absence*, on rank 0; no other rank will come. Barriers go on as if this one had not
                been.
            CheckpointError: the verdict's, or the names of the ranks that did not come within the time-out, or with
                *absence* will not.
        """
        if self.world_size == 1:
            return verdict([value])[0] if each else verdict([value])
        store = self._connect()
        self._count += 1
        prefix = f"orc/{self._name}/{self._count}/"
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        if self.rank != 0:
            try:
                store.set(f"{prefix}{self.rank}", json.dumps([what, value]))
                patience = timedelta(seconds=max(deadline - time.monotonic(), 0) + _VERDICT_S)
                if absence is None:
                    store.wait([f"{prefix}verdict"], patience)
                else:
                    absence.wait_for_verdict(store, f"{prefix}verdict", self._note, patience)
                failed, result, absent = json.loads(store.get(f"{prefix}verdict"))
                if each and failed is None:
                    result = json.loads(store.get(f"{prefix}for/{self.rank}"))
            except RanksElsewhere as error:
                store.delete_key(f"{prefix}{self.rank}")
                self._count -= 1
                raise RankMissing(
                    f"{what}: rank 0 is not here ({error}). It has saved {store.get(self._note).decode()} alone, "
                    f"while rank {self.rank} was elsewhere. Call {what} on every rank at the same place, or on "
                    "the main process alone"
                ) from None
            except StoreTimeout as error:
                raise RankMissing(
                    f"{what}: rank 0 has not come within {timeout_s or self.timeout_s:g} s, rank {self.rank} is here; "
                    f"every rank must call it ({error})"
                ) from None
            except StoreError as error:
                raise RankMissing(f"{what}: rank 0 is gone, rank {self.rank} is here ({error})") from None
            with suppress(StoreError):  # rank 0 may wait for it, but not for ever
                store.set(f"{prefix}left/{self.rank}", "")
            if failed is not None:
                raise (RankMissing if absent else CheckpointError)(failed)
            return result
        failed, result, absent, alone = None, None, False, False
        store.set(f"{prefix}{self.rank}", json.dumps([what, value]))
        try:
            result = verdict(self._collect(store, prefix, what, deadline, timeout_s or self.timeout_s, absence))
            if each:
                for rank, own in enumerate(result[1:], 1):
                    store.set(f"{prefix}for/{rank}", json.dumps(own))
        except RanksElsewhere:
            alone = True
            raise
        except CheckpointError as error:
            failed, absent = str(error), isinstance(error, RankMissing)
            raise
        except BaseException as error:
            failed, absent = f"{what}: rank 0 failed: {type(error).__name__}: {error}", True
            raise
        finally:
            if alone:  # nobody else knows of this barrier
                store.delete_key(f"{prefix}0")
                self._count -= 1
            else:
                self._tell(store, prefix, [failed, None if each else result, absent])
        return result[0] if each else result

    def _tell(self, store: Store, prefix: str, verdict: list[Any]) -> None:
        store.set(f"{prefix}verdict", json.dumps(verdict))
        if self._runs_apart:
            came = [rank for rank in range(1, self.world_size) if store.check([f"{prefix}{rank}"])]
            _unread[id(store), self._name] = store, [f"{prefix}left/{rank}" for rank in came]
        self._forget(store, self._count - 2)

    def note_alone(self, what: str) -> None:
        """On rank 0: note for the others that it has saved *what* without them."""
        self._connect().set(self._note, what)

    @property
    def _note(self) -> str:
        return f"orc/{self._name}/alone"

    def _collect(
        self, store: Store, prefix: str, what: str, deadline: float, patience: float, absence: Absence | None
    ) -> list[Any]:
        keys = [f"{prefix}{rank}" for rank in range(self.world_size)]
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            if absence is None:
                store.wait(keys, left)
            else:
                absence.wait_for_ranks(store, keys, left)
        except RanksElsewhere as error:
            came = [rank for rank, key in enumerate(keys) if rank and store.check([key])]
            if came:
                raise RankMissing(
                    f"{what}: ranks {', '.join(map(str, [0, *came]))} are here, but {error}. Call it on every rank, or "
                    "on the main process alone"
                ) from None
            raise
        except StoreTimeout:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if missing:
                names = ", ".join(map(str, missing))
                raise RankMissing(
                    f"{what}: {'rank' if len(missing) == 1 else 'ranks'} {names} of {self.world_size} did not come "
                    f"within {patience:g} s. Every rank must call it; do not put it under is_main_process"
                ) from None
        said = [json.loads(data) for data in store.multi_get(keys)]
        others = {f"rank {rank}: {name}" for rank, (name, _) in enumerate(said) if name != what}
        if others:
            raise RankMissing(f"rank 0 is in {what}, but {'; '.join(sorted(others))}: the ranks do not run in step")
        return [value for _, value in said]

    def _forget(self, store: Store, number: int) -> None:
        # Everybody who is at barrier n has left barrier n - 1 with its verdict, so n - 2 is read by nobody.
        if number > 0:
            ranks = range(self.world_size)
            for name in ("verdict", *(f"{kind}{rank}" for kind in ("", "left/", "for/") for rank in ranks)):
                store.delete_key(f"orc/{self._name}/{number}/{name}")

    def withdraw(self) -> None:
        """Let the next series have the name of this one, where no barrier has been held that peers could have seen."""
        name, number = self._name.rsplit("/", 1)
        if self._count == 0 and int(number) == self._series[name]:
            self._series[name] -= 1

    def relay(self) -> Relay:
        """A way to send files; all ranks request it, at the same place between two barriers."""
        from orc.runtime.checkpoint.replication.relay import Relay

        self._relays += 1
        return Relay(self._connect(), f"orc/{self._name}/relay/{self._relays}/", self.timeout_s)

    def part(self, timeout_s: float = 10.0) -> None:
        """The last word before a process may exit: rank 0, whose process holds the store, leaves last."""
        if self.world_size == 1:
            return
        store = self._connect()
        self._count += 1
        prefix = f"orc/{self._name}/{self._count}/"
        with suppress(StoreError):  # whoever did not come will not read anything either
            if self.rank != 0:
                store.set(f"{prefix}{self.rank}", "")
            else:
                store.wait([f"{prefix}{rank}" for rank in range(1, self.world_size)], timedelta(seconds=timeout_s))
                _unread.pop((id(store), self._name), None)  # who parts has read the last verdict
                self._forget(store, self._count - 1)

    def _connect(self) -> Store:
        # A connection of our own: a wait blocks everybody else on the same one.
        if self._store is None:
            if self._given is None:
                raise CheckpointError("saving and loading with several processes needs the store of their run")
            self._store = self._given.clone(max(ANSWER_S, self.timeout_s))
        return self._store


class BarrierAlone(Barrier):
    """The barriers of a save that rank 0 makes by itself: it agrees with itself and writes nothing on the store."""

    def hold(self, what: str, value: Any, verdict: Verdict, **options: Any) -> Any:
        """Return the *verdict* about *value*."""
        return verdict([value])

    def part(self, timeout_s: float = 10.0) -> None:
        """Return at once: no other rank takes part."""


def agree_on_no_error(errors: list[Any]) -> None:
    """A verdict: fine when every rank brings `None`, otherwise the error with all of their texts."""
    texts = {f"rank {rank}: {text}" if len(errors) > 1 else str(text) for rank, text in enumerate(errors) if text}
    if texts:
        raise CheckpointError("; ".join(sorted(texts)))


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of *action*, or its error as text to bring to the barrier: no other rank must wait for it."""
    try:
        return action(), None
    except CheckpointError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - raised on every rank by the barrier
        return None, f"{type(error).__name__}: {error}"


def wait_for_readers(timeout_s: float = READERS_S) -> None:
    """On rank 0, whose process holds the store: wait until the others have read the last verdicts."""
    deadline = time.monotonic() + timeout_s
    while _unread:
        _, (store, left) = _unread.popitem()
        with suppress(StoreError):  # whoever is gone reads nothing
            store.wait(left, timedelta(seconds=max(deadline - time.monotonic(), 0)))


_unread: dict[tuple[int, str], tuple[Store, list[str]]] = {}  # where a verdict was given, and who says that it was read
atexit.register(wait_for_readers)
os.register_at_fork(after_in_child=_unread.clear)  # a worker has nobody to wait for
