"""Messages of one batch of any structure: tensors as raw bytes, the rest pickled and signed, in one buffer.

Both ends of a connection keep the same capacity. A message that does not fit is announced in one that does, and both
ends grow; so the steady state is exactly one transfer per batch and rank. Between ranks on one host the tensors lie in
memory that both see (`SharedSlots`), and only the rest is transferred.

That memory has no name (memfd_create(2)): nothing of it is left over, however the processes end, and the size of
/dev/shm does not matter.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from orc.runtime.collectives.objects import sign, verified

CONTENT, LAST, END, ERROR, GROW, OFFER = range(6)
_HEAD = 5  # int64 words: kind, pickled bytes, remainder, capacity wanted, slot with the tensors (-1: they follow)
_ALIGN = 64
_FIRST_CAPACITY = 1 << 13
_SHARED_FROM = 1 << 15  # bytes of tensors; less is sent as fast
_PAGE = 4096
_PROOF = 32  # bytes at the beginning, by which a receiver knows that it has opened the right memory
FEWEST, _MOST = 3, 64  # slots: one that is filled, one in use, one whose tensors are just going


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
    def __init__(self, data: memoryview, tensors: torch.Tensor) -> None:
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
    def tensor_bytes(self) -> int:
        """Bytes that the tensors take."""
        return sum(_aligned(tensor.nbytes) for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Bytes of the whole message."""
        return _aligned(_HEAD * 8) + _aligned(len(self.skeleton)) + self.tensor_bytes

    def write(self, buffer: torch.Tensor, slot: torch.Tensor | None = None, number: int = -1) -> None:
        """Write into *buffer* (uint8, at least `size` long), the tensors into *slot* if there is one."""
        head = torch.tensor([self.message.kind, len(self.skeleton), self.message.remainder, 0, number])
        buffer[: _HEAD * 8] = head.view(torch.uint8)
        at = _aligned(_HEAD * 8)
        buffer[at : at + len(self.skeleton)] = torch.frombuffer(bytearray(self.skeleton), dtype=torch.uint8)
        at += _aligned(len(self.skeleton))
        target = buffer[at:] if slot is None else slot
        at = 0
        for tensor in self.tensors:
            if tensor.nbytes:
                target[at : at + tensor.nbytes] = tensor.view(-1).view(torch.uint8)
            at += _aligned(tensor.nbytes)


class Sender:
    """Rank 0's end of the connection to one rank."""

    def __init__(self, rank: int, group: ProcessGroup, key: bytes) -> None:
        self.rank = rank
        self.key = key
        self.group = group
        self.buffer = torch.zeros(_FIRST_CAPACITY, dtype=torch.uint8)
        self._flight: Work | None = None
        self._shared: SharedSlots | None = None
        self._shares = True  # until it turns out that the other end does not

    def send(self, message: Message) -> None:
        """Hand *message* over; returns as soon as its content may change."""
        packed = Packed.of(message, self.key)
        self.wait()
        number = self._slot_for(packed.tensor_bytes) if packed.tensor_bytes >= _SHARED_FROM else None
        slot = self._shared.slot(number) if self._shared is not None and number is not None else None
        size = packed.size - (packed.tensor_bytes if slot is not None else 0)
        if size > self.buffer.numel():
            capacity = _aligned(size + size // 8)
            self._announce(GROW, b"", capacity)
            self.buffer = torch.zeros(capacity, dtype=torch.uint8)
        packed.write(self.buffer, slot, -1 if number is None else number)
        self._start()

    def _slot_for(self, size: int) -> int | None:
        """Return a free slot of so many bytes, if the two share memory; more are made when all are kept."""
        if self._shared is not None and size <= self._shared.size:
            number = self._shared.take()
            if number is not None:
                return number
        if not self._shares:
            return None
        count = FEWEST
        if self._shared is not None:
            count, size = 2 * self._shared.count, max(size, self._shared.size)
        else:
            size += size // 8
        try:
            self._shared, offer, descriptor = SharedSlots.make(count, size)
        except OSError:
            self._shares, self._shared = False, None
            return None
        try:
            self._announce(OFFER, sign(json.dumps(offer).encode(), self.key), 0)
            taken = torch.zeros(1, dtype=torch.int64)
            dist.recv(taken, src=self.rank, group=self.group)
        finally:
            os.close(descriptor)
        if not taken.item():
            self._shares, self._shared = False, None
            return None
        return self._shared.take()

    def _announce(self, kind: int, content: bytes, capacity: int) -> None:
        """Send a message to the other end itself, and wait until it has it."""
        self.buffer[: _HEAD * 8] = torch.tensor([kind, len(content), 0, capacity, -1]).view(torch.uint8)
        if content:
            at = _aligned(_HEAD * 8)
            self.buffer[at : at + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._start()
        self.wait()

    def _start(self) -> None:
        self._flight = dist.isend(self.buffer, dst=self.rank, group=self.group)

    def wait(self) -> None:
        """Until the last message has left."""
        if self._flight is not None:
            self._flight.wait()
            self._flight = None


class Receiver:
    """The other end: what rank 0 sends here. Contents are views of memory that is not used again while they exist."""

    def __init__(self, group: ProcessGroup, key: bytes) -> None:
        self.group = group
        self.key = key
        self.capacity = _FIRST_CAPACITY
        self._shared: SharedSlots | None = None

    def receive(self) -> Message:
        """The next message."""
        at = _aligned(_HEAD * 8)
        while True:
            buffer = torch.empty(self.capacity, dtype=torch.uint8)
            dist.recv(buffer, src=0, group=self.group)
            kind, length, remainder, capacity, number = buffer[: _HEAD * 8].view(torch.int64).tolist()
            if kind == GROW:
                self.capacity = capacity
                continue
            skeleton = verified(memoryview(cast(Any, buffer[at : at + length].numpy())), self.key)
            if kind != OFFER:
                break
            # What was shared before lives on in the tensors that lie there.
            self._shared = SharedSlots.attach(json.loads(bytes(skeleton)))
            dist.send(torch.tensor([int(self._shared is not None)]), dst=0, group=self.group)
        if number >= 0 and self._shared is not None:
            tensors = self._shared.lease(number)
        else:
            tensors = buffer[at + _aligned(length) :]
        return Message(kind, _Unpickler(skeleton, tensors).load(), remainder)


class SharedSlots:
    """Slots of equal size in memory that a sender and a receiver on the same host share.

    The sender makes them, the receiver attaches to its offer. The receiver's tensors lie in the slot itself. When the
    last of them is gone, the slot is free again.
    """

    def __init__(self, memory: mmap.mmap, count: int, size: int) -> None:
        self._memory = memory
        self.count, self.size = count, size

    @classmethod
    def make(cls, count: int, size: int) -> tuple[SharedSlots, dict[str, Any], int]:
        """Make slots of at least *size* bytes; return the offer for the other process, and what to close afterwards.

        Raises `OSError` where there is no such memory.
        """
        count, size = min(count, _MOST), -(-size // _PAGE) * _PAGE
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous files")
        descriptor = os.memfd_create("orc-batches", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, _PAGE + count * size)
            memory = mmap.mmap(descriptor, _PAGE + count * size)
            memory[:_PROOF] = os.urandom(_PROOF)
            offer = {
                "host": _host(),
                "file": f"/proc/{os.getpid()}/fd/{descriptor}",
                "proof": memory[:_PROOF].hex(),
                "count": count,
                "size": size,
            }
        except BaseException:
            os.close(descriptor)
            raise
        return cls(memory, count, size), offer, descriptor

    @classmethod
    def attach(cls, offer: dict[str, Any]) -> SharedSlots | None:
        """Return the slots that another process offers; `None` when they cannot be seen from here."""
        count, size = int(offer["count"]), int(offer["size"])
        with suppress(OSError, ValueError):
            if offer["host"] != _host():
                return None
            descriptor = os.open(str(offer["file"]), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if os.fstat(descriptor).st_size != _PAGE + count * size:
                    return None
                memory = mmap.mmap(descriptor, _PAGE + count * size)
            finally:
                os.close(descriptor)
            if memory[:_PROOF].hex() == offer["proof"]:
                return cls(memory, count, size)
        return None

    def take(self) -> int | None:
        """Return a slot that is free, and is not any more; `None` when there is none."""
        for number in range(self.count):
            if not self._memory[_PROOF + number]:
                self._memory[_PROOF + number] = 1
                return number
        return None

    def slot(self, number: int) -> torch.Tensor:
        """Return the bytes of a slot, uint8 ``[size]``."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=self.size, offset=self._start(number))

    def lease(self, number: int) -> torch.Tensor:
        """Return the bytes of a slot that becomes free when the tensor and all of its views are gone."""
        start = self._start(number)
        view = memoryview(self._memory)[start : start + self.size]
        weakref.finalize(view, self._release, number).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _release(self, number: int) -> None:
        self._memory[_PROOF + number] = 0

    def _start(self, number: int) -> int:
        return _PAGE + number * self.size


def _host() -> list[str]:
    """Return what two processes have in common that see the same /proc."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(Path("/proc/self/ns/pid").readlink())]
