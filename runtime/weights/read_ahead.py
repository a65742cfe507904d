"""Weights of the layer that comes next, on their way to the device while the present one computes.

A thread reads them into pinned memory, from where they are copied on a stream of their own. Which layer comes next is
learned from the pass before. One layer at most is on its way, and each device has two buffers of pinned memory.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BUFFER_BYTES = 32 * 2**20


class CudaLane:
    """Lane to a CUDA device, a stream beside the one that computes: copies take place in order, later than requested.

    Args:
        device: the device, with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def buffer(self, size: int) -> Tensor:
        """Return *size* bytes of pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def has_room(self, size: int) -> bool:
        """Return whether twice *size* is free: as much is left to the computation."""
        free, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + kept >= 2 * size

    def room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor whose memory belongs to the lane's stream.

        Memory of a former layer is given out again only after the computation with it (`hand_over`); that of a layer
        that nobody took only after its own copy, which was on this stream.
        """
        with torch.cuda.stream(self.stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        """Have *source* copied on the lane's stream; return an event after it."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self._event(self.stream)

    def computed(self) -> torch.cuda.Event:
        """Return an event on the stream that computes."""
        return self._event(torch.cuda.current_stream(self.device))

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait for the event."""
        mark.synchronize()

    def hand_over(self, tensors: list[Tensor], mark: torch.cuda.Event) -> None:
        """Have the stream that computes wait for the event, and note that it uses *tensors*."""
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(computing)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # who waits for it leaves the processor to others
        stream.record_event(event)
        return event


class Brought(NamedTuple):
    """Weight on the device, and the one at rest that it was copied from."""

    source: Tensor
    version: int
    value: Tensor


@dataclass
class _Buffer:
    bytes: Tensor
    busy: list[Any] = field(default_factory=list)  # the mark of the last copy out of it


class ReadAhead:
    """Weights of one layer at a time, brought to a device before they are requested.

    Args:
        device: where the layers compute.
        lane: the way there; by default the one of a CUDA device.
        buffer_bytes: size of each of the two buffers.
    """

    def __init__(self, device: torch.device, lane: CudaLane | None = None, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self.device, self.lane, self.buffer_bytes = device, lane, buffer_bytes
        self._thread: ThreadPoolExecutor | None = None
        self._buffers: list[_Buffer] = []
        self._turn = 0
        self._followers: dict[Any, tuple[Any, Any]] = {}
        self._seen: set[Any] = set()  # the layers of this pass
        self._last: Any = None
        self._ahead: tuple[Any, Mapping[str, Tensor], Future[tuple[dict[str, Brought], Any]]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes another one for the same device; it learns the order anew."""
        return type(self), (self.device, None, self.buffer_bytes)

    def following(self, hook: Any, module: Any) -> tuple[Any, Any] | None:
        """Note that *hook* has its turn, in *module*; return those that had it next in the pass before.

        A hook that had its turn already begins another pass, for which nothing is brought before it begins: weights
        may be changed in between.
        """
        if hook in self._seen:
            self._seen.clear()
        elif self._last is not None:
            self._followers[self._last] = hook, module
        self._seen.add(hook)
        self._last = hook
        follower = self._followers.get(hook)
        return None if follower is None or follower[0] in self._seen else follower

    def start(
        self, hook: Any, weights: Mapping[str, Tensor], wanted: Mapping[str, torch.dtype], shared: Container[int]
    ) -> None:
        """Begin to bring the weights of *hook* to the device.

        Args:
            hook: whose they are.
            weights: the weights at rest.
            wanted: the names of those to bring, and what a floating-point one is converted to.
            shared: addresses of weights that other layers use too; they are not brought.
        """
        self.give_up()
        if self.lane is None:
            self.lane = CudaLane(self.device)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="orc-read-ahead")
        # Until the layer before the present one has been computed its memory is in use: so there are two at most.
        free = self.lane.computed()
        self._ahead = hook, weights, self._thread.submit(self._bring, self.lane, weights, dict(wanted), shared, free)

    def take(self, hook: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that were brought for *hook*, by name, for use on the current stream.

        Those that were written to since are not among them, and none where *weights* are others.
        """
        if self._ahead is None or self._ahead[0] is not hook or self._ahead[1] is not weights:
            self.give_up()
            return {}
        future = self._ahead[2]
        self._ahead = None
        brought, mark = future.result()
        if mark is not None:
            assert self.lane is not None
            self.lane.hand_over([read.value for read in brought.values()], mark)
        return {name: read.value for name, read in brought.items() if read.version == _version(read.source)}

    def give_up(self) -> None:
        """Forget the weights that are on their way, when the thread is done with them."""
        if self._ahead is not None:
            future = self._ahead[2]
            self._ahead = None
            if not future.cancel():
                wait([future])

    def _bring(
        self,
        lane: CudaLane,
        weights: Mapping[str, Tensor],
        wanted: Mapping[str, torch.dtype],
        shared: Container[int],
        free: Any,
    ) -> tuple[dict[str, Brought], Any]:
        """Bring weights; return them and the mark of the last copy. Runs in the thread."""
        brought: dict[str, Brought] = {}
        mark = None
        lane.wait(free)
        sources = {name: weights[name] for name in wanted}
        sources = {
            name: source for name, source in sources.items() if _is_plain(source) and source.data_ptr() not in shared
        }
        dtypes = {
            name: wanted[name] if source.is_floating_point() else source.dtype for name, source in sources.items()
        }
        if not lane.has_room(sum(source.numel() * dtypes[name].itemsize for name, source in sources.items())):
            return {}, None
        with torch.no_grad():
            for name, source in sources.items():
                version = _version(source)
                try:
                    value = lane.room(source.shape, dtypes[name])
                except torch.OutOfMemoryError:
                    return {}, None  # the layer gets its weights when its turn comes, and has the device for itself
                mark = self._copy(lane, source.detach().view(-1), value.view(-1), mark)
                brought[name] = Brought(source, version, value)
        return brought, mark

    def _copy(self, lane: CudaLane, source: Tensor, target: Tensor, mark: Any) -> Any:
        step = self.buffer_bytes // target.dtype.itemsize
        for begin in range(0, source.numel(), step):
            place = target[begin : begin + step]
            buffer = self._free_buffer(lane)
            staged = buffer.bytes[: place.nbytes].view(target.dtype)
            staged.copy_(source[begin : begin + step])  # here the pages of a mapped weight are read
            mark = lane.copy(staged, place)
            buffer.busy.append(mark)
        return mark

    def _free_buffer(self, lane: CudaLane) -> _Buffer:
        """Return the buffer whose turn it is, once the copy out of it has ended."""
        if len(self._buffers) < 2:
            self._buffers.append(_Buffer(lane.buffer(self.buffer_bytes)))
        buffer = self._buffers[self._turn % 2]
        self._turn += 1
        if buffer.busy:
            lane.wait(buffer.busy.pop())
        return buffer


def _is_plain(source: Tensor) -> bool:
    """Return whether *source* is a plain tensor on the CPU whose values lie one after the other."""
    return type(source) in (Tensor, torch.nn.Parameter) and source.device.type == "cpu" and source.is_contiguous()


def _version(source: Tensor) -> int:
    """Return the number of times that *source* was written to; those of inference mode do not count."""
    return 0 if source.is_inference() else source._version
