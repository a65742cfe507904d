"""The way of a loader's batches to a CUDA device: on a stream of its own, beside what the device computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orc.runtime.collectives.tree import elements, send_to_device


@dataclass
class Arriving:
    """A batch on its way: its *content* on the device, and the event after its last copy.

    Without an event nothing was copied: the content is where it was given. Whoever receives it takes the content, so
    that memory which the loop lets go of is free although iterators still have this.
    """

    content: Any
    arrived: Any = None


class Lane:
    """Copies batches to *device* on a stream of its own.

    On the stream that computes a copy waits for everything that was launched before it, though it needs none of it.
    Here it begins at once. The memory that it fills is the lane's, so each tensor is recorded on the stream that uses
    it: what the loop lets go of is filled again only after the kernels that read it.

    Args:
        device: a CUDA device.
        waits: have the host wait for each copy, though not for what is computed: batches that are not in fresh pinned
            memory may be written to by whoever made them, as soon as they have been handed out.
        cuda: what makes streams and events.
    """

    def __init__(self, device: torch.device, *, waits: bool, cuda: Any = torch.cuda) -> None:
        self._device, self._waits, self._cuda = device, waits, cuda
        self._stream = cuda.Stream(device)

    def start(self, batch: Any) -> Arriving:
        """Begin to copy *batch*, of any nesting."""
        if not _all_plain(batch):
            return Arriving(batch)
        with self._cuda.stream(self._stream):
            content = send_to_device(batch, self._device, non_blocking=True)
            arrived = self._stream.record_event()
        if self._waits:
            arrived.synchronize()
        return Arriving(content, arrived)

    def receive(self, arriving: Arriving) -> Any:
        """Return the batch, for use on the current stream, which waits for it."""
        content, arriving.content = arriving.content, None
        if arriving.arrived is None:
            # An object with a `to` of its own: nobody could record its tensors on the stream that uses them.
            return send_to_device(content, self._device, not self._waits)
        stream = self._cuda.current_stream(self._device)
        stream.wait_event(arriving.arrived)
        for _, leaf in elements(content):
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":  # a PackedSequence leaves its sizes on the host
                leaf.record_stream(stream)
        return content


def _all_plain(batch: Any) -> bool:
    """Return whether the tensors in *batch* are plain ones of the host, and nothing else in it could move."""
    moves = False
    for _, leaf in elements(batch):
        if isinstance(leaf, Tensor):
            if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.device.type != "cpu":
                return False
            moves = True
        elif hasattr(leaf, "to"):
            return False
    return moves


def one_ahead(source: Iterator[Any], begin: Callable[[Any], Any]) -> Iterator[Any]:
    """``begin(batch)`` of each batch of *source*, called before the one in front of it is given out."""
    nothing = object()
    failure: Exception | None = None
    given = _begun(next(source, nothing), nothing, begin)
    while given is not nothing:
        try:
            following = _begun(next(source, nothing), nothing, begin)
        except Exception as error:  # noqa: BLE001 (it is raised when what was read before it is out)
            failure, following = error, nothing
        yield given
        given = following
    if failure is not None:
        raise failure


def _begun(batch: Any, nothing: Any, begin: Callable[[Any], Any]) -> Any:
    return batch if batch is nothing else begin(batch)
