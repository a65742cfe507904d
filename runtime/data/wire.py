"""Messages of one batch of any structure: tensors as raw bytes, the rest pickled and signed, in one buffer.

Both ends of a connection keep the same capacity. A message that does not fit is announced in one that does, and both
ends grow; so the steady state is exactly one transfer per batch and rank.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from orc.runtime.collectives.signed import sign, verified

CONTENT, LAST, END, ERROR, GROW = range(5)
_HEAD = 4  # int64 words: kind, pickled bytes, remainder, capacity wanted
_ALIGN = 64
_FIRST_CAPACITY = 1 << 16


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class Message:
    """A message to one rank: a part of a batch (`CONTENT`, `LAST`), the `END`, or the text of an `ERROR`.

    ``remainder`` counts the samples of the global batch that are no repetitions, -1 for all.
    """

    kind: int
    content: Any = None
    remainder: int = -1


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.requires_grad:
            self.tensors.append(obj.detach().cpu().contiguous())
            return len(self.tensors) - 1, obj.dtype, tuple(obj.shape)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: torch.Tensor) -> None:
        super().__init__(io.BytesIO(data))
        self.buffer = tensors
        self.at = 0

    def persistent_load(self, pid: Any) -> torch.Tensor:
        _, dtype, shape = pid
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        part = self.buffer[self.at : self.at + size]
        self.at += _aligned(size)
        return part.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


@dataclass
class Packed:
    """A message before it is written: the pickled skeleton and the tensors that follow it, each aligned."""

    message: Message
    skeleton: bytes
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, message: Message, key: bytes) -> Packed:
        """Pack *message*, its skeleton signed with *key*; tensors on other devices are copied to the CPU."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(message.content)
        return cls(message, sign(file.getvalue(), key), pickler.tensors)

    @property
    def size(self) -> int:
        """Bytes of the whole message."""
        tensors = sum(_aligned(tensor.nbytes) for tensor in self.tensors)
        return _aligned(_HEAD * 8) + _aligned(len(self.skeleton)) + tensors

    def write(self, buffer: torch.Tensor) -> None:
        """Write into *buffer* (uint8, at least `size` long)."""
        head = torch.tensor([self.message.kind, len(self.skeleton), self.message.remainder, 0])
        buffer[: _HEAD * 8] = head.view(torch.uint8)
        at = _aligned(_HEAD * 8)
        buffer[at : at + len(self.skeleton)] = torch.frombuffer(bytearray(self.skeleton), dtype=torch.uint8)
        at += _aligned(len(self.skeleton))
        for tensor in self.tensors:
            if tensor.nbytes:
                buffer[at : at + tensor.nbytes] = tensor.view(-1).view(torch.uint8)
            at += _aligned(tensor.nbytes)


class Sender:
    """Rank 0's end of the connection to one rank."""

    def __init__(self, rank: int, group: ProcessGroup, key: bytes) -> None:
        self.rank = rank
        self.key = key
        self.group = group
        self.buffer = torch.zeros(_FIRST_CAPACITY, dtype=torch.uint8)
        self._flight: Work | None = None

    def send(self, message: Message) -> None:
        """Hand *message* over; returns as soon as its content may change."""
        packed = Packed.of(message, self.key)
        self.wait()
        if packed.size > self.buffer.numel():
            capacity = _aligned(packed.size + packed.size // 8)
            self.buffer[: _HEAD * 8] = torch.tensor([GROW, 0, 0, capacity]).view(torch.uint8)
            self._start()
            self.wait()
            self.buffer = torch.zeros(capacity, dtype=torch.uint8)
        packed.write(self.buffer)
        self._start()

    def _start(self) -> None:
        self._flight = dist.isend(self.buffer, dst=self.rank, group=self.group)

    def wait(self) -> None:
        """Until the last message has left."""
        if self._flight is not None:
            self._flight.wait()
            self._flight = None


class Receiver:
    """The other end: what rank 0 sends here. Contents are views of a buffer that is not used again."""

    def __init__(self, group: ProcessGroup, key: bytes) -> None:
        self.group = group
        self.key = key
        self.capacity = _FIRST_CAPACITY

    def receive(self) -> Message:
        """The next message."""
        while True:
            buffer = torch.empty(self.capacity, dtype=torch.uint8)
            dist.recv(buffer, src=0, group=self.group)
            kind, length, remainder, capacity = buffer[: _HEAD * 8].view(torch.int64).tolist()
            if kind != GROW:
                break
            self.capacity = capacity
        at = _aligned(_HEAD * 8)
        skeleton = verified(buffer[at : at + length].numpy().tobytes(), self.key)
        content = _Unpickler(skeleton, buffer[at + _aligned(length) :]).load()
        return Message(kind, content, remainder)
