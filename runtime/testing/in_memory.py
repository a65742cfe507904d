"""A process group without processes: ranks are threads of one process, or one rank stands among mirrors of itself.

Everything that is written against ``torch.distributed`` (this runtime, DDP) works on it unchanged. It is made for
tests: collectives block, copy, and refuse what does not fit together instead of hanging.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

# A work that is done, which C++ (DDP) understands too; there is no public name for it.
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d
from torch.futures import Future

from orc.runtime.core.errors import ContextError, DistributedOperationException
from orc.runtime.core.store import LocalStore

Tensors = list[torch.Tensor]


class PeerFailed(ContextError):
    """Another rank of the same in-memory world raised, so this one cannot go on."""


class Exchange(Protocol):
    """Interface through which ranks communicate: every collective is one exchange of values."""

    def swap(self, rank: int, what: str, value: Any) -> list[Any]:
        """Bring *value*; the values of all ranks. *what* must be the same everywhere."""

    def put(self, source: int, target: int, tag: int, value: Any) -> None:
        """Send *value* from rank *source* to rank *target*."""

    def take(self, source: int | None, target: int, tag: int) -> tuple[int, Any]:
        """Return the sender and the value of a message to *target*, from *source* or, with `None`, from any rank."""

    def part(self, ranks: Sequence[int]) -> Exchange:
        """Between *ranks* alone, which count from 0 there."""


class ThreadExchange:
    """Between threads of this process.

    Args:
        size: ranks.
        timeout_s: how long to wait for the others, in seconds.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._changed = threading.Condition()
        self._calls = [0] * size  # collectives each rank has come to
        self._brought: dict[int, dict[int, tuple[str, Any]]] = {}
        self._left: dict[int, int] = {}
        self._mail: dict[int, deque[tuple[int, int, Any]]] = {rank: deque() for rank in range(size)}
        self._failed: tuple[int, BaseException] | None = None
        self._parts: dict[tuple[int, ...], ThreadExchange] = {}

    def part(self, ranks: Sequence[int]) -> ThreadExchange:
        """The exchange between *ranks* alone, the same for each of them; a rank that fails ends it, too."""
        with self._changed:
            key = tuple(ranks)
            if key not in self._parts:
                self._parts[key] = ThreadExchange(len(key), self.timeout_s)
                self._parts[key]._failed = self._failed
            return self._parts[key]

    def swap(self, rank: int, what: str, value: Any) -> list[Any]:
        """The values of all ranks. Raises `DistributedOperationException` when they do not call the same."""
        with self._changed:
            number = self._calls[rank]
            self._calls[rank] += 1
            brought = self._brought.setdefault(number, {})
            brought[rank] = what, value
            self._changed.notify_all()
            self._wait(lambda: len(brought) == self.size, lambda: self._missing(what, brought))
            self._left[number] = self._left.get(number, 0) + 1
            if self._left[number] == self.size:
                del self._brought[number], self._left[number]
        if len({said for said, _ in brought.values()}) > 1:
            lines = "\n".join(f"  - Process {peer}: {brought[peer][0]}" for peer in range(self.size))
            raise DistributedOperationException(f"the ranks do not call the same collective:\n{lines}")
        return [brought[peer][1] for peer in range(self.size)]

    def put(self, source: int, target: int, tag: int, value: Any) -> None:
        """Send; never waits."""
        with self._changed:
            self._mail[target].append((source, tag, value))
            self._changed.notify_all()

    def take(self, source: int | None, target: int, tag: int) -> tuple[int, Any]:
        """The oldest message that fits."""
        box = self._mail[target]

        def fitting() -> int | None:
            return next((at for at, (by, its, _) in enumerate(box) if its == tag and source in (None, by)), None)

        with self._changed:
            self._wait(
                lambda: fitting() is not None,
                lambda: f"rank {target} waits for a message of rank {'any' if source is None else source}",
            )
            at = fitting()
            assert at is not None
            by, _, value = box[at]
            del box[at]
            return by, value

    def fail(self, rank: int, error: BaseException) -> None:
        """Rank *rank* has ended with *error*: whoever waits, or comes to wait, gets `PeerFailed`."""
        with self._changed:
            self._failed = self._failed or (rank, error)
            self._changed.notify_all()
            parts = list(self._parts.values())
        for part in parts:
            part.fail(rank, error)

    def _wait(self, done: Callable[[], bool], why: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not done():
            if self._failed is not None:
                rank, error = self._failed
                raise PeerFailed(f"rank {rank} failed: {type(error).__name__}: {error}")
            if not self._changed.wait(deadline - time.monotonic()) and not done():
                raise ContextError(f"{why()}, for more than {self.timeout_s:g} s")

    def _missing(self, what: str, brought: dict[int, Any]) -> str:
        absent = ", ".join(str(rank) for rank in range(self.size) if rank not in brought)
        return f"ranks {sorted(brought)} wait in {what} for rank {absent}"


class Mirrors:
    """A rank on its own: every peer does and has the same as this rank."""

    def __init__(self, size: int) -> None:
        self.size = size

    def part(self, ranks: Sequence[int]) -> Mirrors:
        """The same for as many as *ranks*."""
        return Mirrors(len(ranks))

    def swap(self, rank: int, what: str, value: Any) -> list[Any]:
        """Return the same value of every rank."""
        return [value] * self.size

    def put(self, source: int, target: int, tag: int, value: Any) -> None:
        """Discard *value*: there is no peer to receive it."""

    def take(self, source: int | None, target: int, tag: int) -> tuple[int, Any]:
        """Raise `ContextError`: there is no sender."""
        raise ContextError(
            f"rank {target} of a fake context waits for a message of rank {source}, but it has no peers; "
            "run all ranks with orc.runtime.testing.run_threads"
        )


def _done(result: Any = None) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class _Receiving(dist.Work):
    """A receive that takes place when it is waited for."""

    def __init__(self, receive: Callable[[], int]) -> None:
        super().__init__()
        self._receive = receive
        self._source: int | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Until the message is in the tensor."""
        if self._source is None:
            self._source = self._receive()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` has received the message."""
        return self._source is not None

    def _source_rank(self) -> int:
        assert self._source is not None
        return self._source


def _copy(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.detach().copy_(value)


def _kept(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Copies: the owner may overwrite its tensors while slower ranks still read."""
    return [tensor.detach().clone() for tensor in tensors]


_COMBINE: tuple[tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)


def _combined(tensors: Tensors, op: Any) -> torch.Tensor:
    combine = next((function for known, function in _COMBINE if op == known), None)
    if combine is None:
        raise NotImplementedError(f"in-memory groups do not know the reduction {op}")
    total = functools.reduce(combine, tensors)
    return total / len(tensors) if op == dist.ReduceOp.AVG else total


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


class InMemoryGroup(dist.ProcessGroup):
    """Process group of one rank, whose collectives run over an `Exchange`."""

    is_open = True  # torch.distributed does not know it, so it cannot say

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one constructor of two
        self._exchange = exchange
        self._parts: list[InMemoryGroup] = []
        self.register()

    def register(self, ranks: Sequence[int] | None = None) -> None:
        """Register the ranks with torch.distributed, which needs them for a group before it broadcasts."""
        world = distributed_c10d._world
        world.pg_group_ranks[self] = {rank: place for place, rank in enumerate(ranks or range(self.size()))}
        world.pg_backend_config[self] = str(distributed_c10d.BackendConfig(dist.Backend("gloo")))

    def subgroup(self, ranks: Sequence[int]) -> InMemoryGroup:
        """The group of *ranks* of this one, which has this rank among them."""
        made = InMemoryGroup(list(ranks).index(self.rank()), len(ranks), self._exchange.part(ranks))
        made.register(ranks)
        self._parts.append(made)
        return made

    def unregister(self) -> None:
        """The opposite."""
        for part in self._parts:
            part.unregister()
        distributed_c10d._world.pg_group_ranks.pop(self, None)
        distributed_c10d._world.pg_backend_config.pop(self, None)

    def getBackendName(self) -> str:
        """Return the name of the backend, as messages show it."""
        return "in-memory"

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a name that may change there
        """Unique in this process."""
        return f"in-memory-{id(self)}"

    def _swap(self, what: str, value: Any, like: Sequence[torch.Tensor]) -> list[Any]:
        return self._exchange.swap(self.rank(), f"{what}({_shapes(like)})", value)

    # One method per collective, under the names that torch.distributed calls, in the one of their forms that it calls.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:  # type: ignore[override]
        """All ranks get the combination of all."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        everything = self._swap("all_reduce", _kept(tensors), tensors)
        _copy(tensors, [_combined(list(column), op) for column in zip(*everything, strict=True)])
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Any:  # type: ignore[override]
        """Rank ``opts.rootRank`` gets the combination of all."""
        everything = self._swap(f"reduce to {opts.rootRank}", _kept(tensors), tensors)
        if self.rank() == opts.rootRank:
            _copy(tensors, [_combined(list(column), opts.reduceOp) for column in zip(*everything, strict=True)])
        return _done(tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:  # type: ignore[override]
        """All ranks get what rank ``opts.rootRank`` has."""
        mine = _kept(tensors)
        everything = self._swap(f"broadcast from {opts.rootRank}", mine, tensors)
        if self.rank() != opts.rootRank:
            _copy(tensors, everything[opts.rootRank])
        return _done(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:  # type: ignore[override]
        """All ranks get all tensors, in a list."""
        everything = self._swap("all_gather", _kept(inputs), inputs)
        for place, targets in enumerate(outputs):
            _copy(targets, [values[place] for values in everything])
        return _done(outputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """All ranks get all lists of tensors."""
        everything = self._swap("all_gather_coalesced", _kept(inputs), inputs)
        for targets, values in zip(outputs, everything, strict=True):
            _copy(targets, values)
        return _done(outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """All ranks get all tensors, one behind the other."""
        everything = self._swap("all_gather_single", _kept([input])[0], [input])
        _copy([output.view(-1)], [torch.cat([value.reshape(-1) for value in everything])])
        return _done(output)

    _allgather_base = all_gather_single  # until torch 2.12

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:  # type: ignore[override]
        """Rank ``opts.rootRank`` gets all tensors."""
        everything = self._swap(f"gather to {opts.rootRank}", _kept(inputs), inputs)
        if self.rank() == opts.rootRank:
            _copy(outputs[0], [values[0] for values in everything])
        return _done(outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:  # type: ignore[override]
        """Each rank gets its one of the tensors of rank ``opts.rootRank``."""
        mine = _kept(inputs[0]) if self.rank() == opts.rootRank else None
        given = self._swap(f"scatter from {opts.rootRank}", mine, outputs)[opts.rootRank]
        if given is not None:
            _copy(outputs, [given[self.rank()]])
        return _done(outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:  # type: ignore[override]
        """Each rank gets the combination of the tensors that are meant for it."""
        everything = self._swap("reduce_scatter", _kept(inputs[0]), inputs[0])
        _copy(outputs, [_combined([values[self.rank()] for values in everything], opts.reduceOp)])
        return _done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """The same for one tensor that is cut into equal parts."""
        everything = self._swap("reduce_scatter_single", _kept([input])[0], [input])
        parts = [value.reshape(-1).chunk(self.size())[self.rank()] for value in everything]
        _copy([output.view(-1)], [_combined(parts, opts.reduceOp)])
        return _done(output)

    _reduce_scatter_base: Any = reduce_scatter_single  # until torch 2.12

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Rank i gets the i-th tensor of each rank. Sizes may differ."""
        everything = self._exchange.swap(self.rank(), "all_to_all", _kept(inputs))
        _copy(outputs, [values[self.rank()] for values in everything])
        return _done(outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, out_splits: Any = None, in_splits: Any = None, opts: Any = None
    ) -> Any:
        """The same for one tensor that is cut along its first dimension."""
        sizes = list(in_splits or [])
        parts = input.split(sizes) if sizes else input.chunk(self.size())
        everything = self._exchange.swap(self.rank(), "all_to_all_single", _kept(parts))
        _copy([output], [torch.cat([values[self.rank()] for values in everything])])
        return _done(output)

    alltoall_base: Any = all_to_all_single  # until torch 2.12

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        self._swap("barrier", None, ())
        return _done()

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Any:
        """To one rank; never waits."""
        self._exchange.put(self.rank(), target, tag, _kept(tensors))
        return _done(tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        """From one rank."""
        return _Receiving(lambda: self._receive(tensors, source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """From any rank."""
        return _Receiving(lambda: self._receive(tensors, None, tag))

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> int:
        by, values = self._exchange.take(source, self.rank(), tag)
        _copy(tensors, values)
        return by


class InMemoryWorld:
    """Ranks in one process that exchange tensors through memory.

    Args:
        size: ranks.
        timeout_s: how long a rank waits for the others, in seconds.
    """

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        if size < 1:
            raise ValueError(f"a world of {size} ranks makes no sense")
        self.size = size
        self.exchange = ThreadExchange(size, timeout_s)
        self.store = LocalStore()
        self.groups = [InMemoryGroup(rank, size, self.exchange) for rank in range(size)]

    def close(self) -> None:
        """Let torch.distributed forget the groups."""
        for group in self.groups:
            group.unregister()


@functools.lru_cache(maxsize=1024)
def mirror_group(rank: int, size: int) -> InMemoryGroup:
    """The group of a rank on its own; it has no state, so there is one per place."""
    return InMemoryGroup(rank, size, Mirrors(size))
