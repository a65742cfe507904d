"""Worker processes of loaders: patience when a whole job is signalled, and streams that are dealt out to workers."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

GRACE_S = 60
_watched = threading.local()  # .reads: names that were read of this worker's WorkerInfo


@dataclass
class WorkerStart:
    """The ``worker_init_fn`` of prepared loaders: the script's own, and patience with SIGTERM.

    Schedulers and torchrun signal whole process groups. A worker that left at once would end its rank with an error
    before the ranks have saved together, so it goes on for `GRACE_S` seconds; it ends with its rank in any case.
    """

    inner: Callable[[int], Any] | None = None

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker, before its first sample."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave_later)
        if self.inner is not None:
            reads = _watch(get_worker_info())
            self.inner(worker_id)
            # torch documents this way of giving each worker its part; random seeds need no dataset.
            _watched.assigned = "dataset" in reads


def _leave_later(number: int, frame: Any) -> None:
    signal.alarm(GRACE_S)  # the default action of SIGALRM ends the process


def _watch(info: Any) -> set[str]:
    """The names that are read of *info* from now on: whoever reads the worker's number shares out the data itself."""
    reads: set[str] = set()
    _watched.reads = reads
    kind = type(info)
    if not hasattr(kind, "__orc_watched__"):
        inherited: Any = kind.__getattribute__

        def read(self: Any, name: str) -> Any:
            _watched.reads.add(name)
            value = inherited(self, name)
            # Scripts look for their own dataset here, not for the prepared loader's wrapper of it.
            return getattr(value, "__orc_wrapped__", value) if name == "dataset" else value

        watched = type(kind.__name__, (kind,), {"__slots__": (), "__orc_watched__": True, "__getattribute__": read})
        object.__setattr__(info, "__class__", watched)
    return reads


class Opened(NamedTuple):
    """An iterator over a stream in this process, and which of how many equal shares of its samples are this worker's.

    ``own`` says that the dataset shares itself out among several workers: nothing is known about others' shares.
    """

    samples: Iterator[Any]
    worker: int = 0
    workers: int = 1
    own: bool = False


def open_stream(dataset: Iterable[Any]) -> Opened:
    """Begin an iteration over *dataset*.

    In a worker of a loader every other worker has the same dataset. One that asks for the worker's number before its
    first sample (`torch.utils.data.get_worker_info`), or was given its part by ``worker_init_fn``, yields this worker's
    samples; any other yields all samples in every worker, so a worker takes its share of them.
    """
    info = get_worker_info()
    if info is None:
        return Opened(iter(dataset))
    worker, workers = info.id, info.num_workers
    reads = _watch(info)
    stream = iter(dataset)
    first = list(itertools.islice(stream, 1))
    shares_itself = not reads.isdisjoint(("id", "num_workers")) or getattr(_watched, "assigned", False)
    stream = itertools.chain(first, stream)
    return Opened(stream, own=workers > 1) if shares_itself else Opened(stream, worker, workers)
