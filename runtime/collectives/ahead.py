"""Collectives on GPUs that begin before the hosts of the ranks have met to compare what they bring.

A host that meets its peers at every `gather` waits for the slowest of them, though its device has work left. But ranks
that bring different operands must not run into NCCL, which would hang. So each rank keeps what was called after what.
All of them have agreed on that, so all *expect* the same call next: the one that followed the last two times.

- A rank whose call is the expected one begins at once. It tells the others what it brings, and reads what they have
  told when that has arrived: at one of its next calls.
- A rank whose call is another one first takes part in the expected one, with zeros, and tells the others too. Then it
  waits for what they tell. If all have brought the same other call, they make that now, the ordinary way. If not, it
  raises.
- Where nothing is expected (the first times, after something new, for what is large), all meet first.

No rank waits for one that does not come. Which of the three happens is decided from what all know, but for the second,
which a rank decides alone; and for it the device and the hosts make the same collectives in the same order as for the
first. Only after it knows that *all* ranks are there does a rank make one that is not expected. Ranks that differ
differ from the expected call, too, except for one of them at most: so at least one raises at the call itself. Those
that began it raise at a later call: what they got in between has zeros in place of that rank's values.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from orc.runtime.collectives.exchange import all_gather_flat
from orc.runtime.core.errors import DistributedOperationException

if TYPE_CHECKING:
    from orc.runtime.collectives.packing import Key
    from orc.runtime.core.context import RunContext

LARGEST_BYTES = 64 << 20  # of a result: beyond that, a meeting costs little beside the transfer
_CONFIRMED = 2  # times that a call must have followed another one before it is expected
_CALLS = 256
_ON_THE_WAY = 32  # calls that a rank may be ahead of what the others have told


@dataclass(frozen=True)
class Call:
    """One rank's collective: its *operation*, the *key* of its operand, and the *mark* by which it is told.

    ``perform`` does it, with any tensors of that key.
    """

    operation: str
    key: Key
    mark: int
    perform: Callable[[list[Tensor]], Any]

    def shown(self) -> str:
        """Operation and shapes, for messages."""
        shapes = ", ".join(str(list(shape)) for shape, _, _ in self.key)
        return f"`orc.runtime.{self.operation}`" + (f" of {shapes}" if shapes else "")


class _Told:
    """What the ranks tell of one call: *marks* of all, once they have arrived."""

    def __init__(self, ctx: RunContext, call: Call) -> None:
        self.call = call
        self._marks = torch.empty(ctx.world_size, dtype=torch.int64, device="cpu")  # also where another is the default
        # The tensor is kept until the others have it.
        self._mine = torch.tensor([call.mark], device="cpu")
        self._work = all_gather_flat(self._marks, self._mine, ctx.control_group(call.operation), async_op=True)

    @property
    def arrived(self) -> bool:
        return bool(self._work.is_completed())

    def marks(self) -> list[int]:
        """Those of all ranks, waiting for them."""
        self._work.wait()
        return self._marks.tolist()


class History:
    """What was called after what in a run of *ctx*; the same on all its ranks."""

    def __init__(self, ctx: RunContext) -> None:
        self._ranks = ctx.world_size
        self._last: int | None = None
        self._followers: dict[int | None, tuple[int, int]] = {}  # mark -> mark of the call after it, and how often
        self._calls: dict[int, Call] = {}
        self._told: deque[_Told] = deque()

    def expected(self) -> Call | None:
        """The call that all ranks expect next; `None` where they meet first."""
        mark, times = self._followers.get(self._last, (0, 0))
        return self._calls.get(mark) if times >= _CONFIRMED else None

    def note(self, mark: int, call: Call | None) -> None:
        """Keep that all have made the call of *mark*; *call* if it may be begun ahead."""
        if len(self._followers) >= _CALLS:
            self._followers.clear()
            self._calls.clear()
            self._last = None
        known, times = self._followers.get(self._last, (mark, 0))
        self._followers[self._last] = (mark, times + 1 if known == mark else 1)
        self._last = mark
        if call is not None and self._bytes(call) <= LARGEST_BYTES:
            self._calls[mark] = call

    def _bytes(self, call: Call) -> int:
        return self._ranks * sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in call.key)

    def begins(self, ctx: RunContext, call: Call, expected: Call) -> bool:
        """Return whether *call* begins now: it is the *expected* one. If not, all ranks are there for the same other.

        Raises:
            DistributedOperationException: they are not.
        """
        told = _Told(ctx, call)
        if call.mark == expected.mark:
            self._told.append(told)
            self.note(call.mark, call)
            return True
        expected.perform([torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in expected.key])
        marks = told.marks()
        if set(marks) != {call.mark}:
            self.note(expected.mark, expected)  # as those do that began it
            raise DistributedOperationException(_differing(marks, {expected.mark: expected, call.mark: call}))
        return False

    def look_back(self) -> None:
        """Look at what was told of calls that were begun. Raises `DistributedOperationException` where ranks differed.

        It waits only for ranks that are many calls behind.
        """
        while self._told and (self._told[0].arrived or len(self._told) > _ON_THE_WAY):
            told = self._told.popleft()
            marks = told.marks()
            if set(marks) != {told.call.mark}:
                text = _differing(marks, {told.call.mark: told.call})
                raise DistributedOperationException(f"{text}\nThis was an earlier call, which this rank had begun.")


def _differing(marks: list[int], known: dict[int, Call]) -> str:
    lines = "\n".join(
        f"  - Process {rank}: {known[mark].shown() if mark in known else 'another one, which its own error names'}"
        for rank, mark in enumerate(marks)
    )
    return (
        f"Cannot apply desired operation: the processes call different ones, or pass operands that differ.\n\n{lines}"
    )


_histories: WeakKeyDictionary[RunContext, History] = WeakKeyDictionary()


def begins_early(ctx: RunContext) -> bool:
    """Return whether collectives may begin before the ranks have met: on CUDA, beside a group for the hosts."""
    return (
        ctx.device.type == "cuda"
        and not ctx.debug
        and ctx.compute.collectives is None
        and not hasattr(ctx.group, "subgroup")  # of a simulated run
        and ctx.hosts_meet
    )


def history_of(ctx: RunContext) -> History | None:
    """Return the history of *ctx*; `None` where all ranks meet before every collective."""
    if not begins_early(ctx):
        return None
    if ctx not in _histories:
        _histories[ctx] = History(ctx)
    return _histories[ctx]
