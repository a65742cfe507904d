"""Memory that a sender and a receiver on the same host share, in slots: what is written here is sent without a copy.

It has no name (memfd_create(2)): nothing of it is left over, however the processes end, and the size of /dev/shm does
not matter. The receiver's tensors lie in the slot itself. When the last of them is gone, the slot is free again.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_PAGE = 4096
_PROOF = 32  # bytes at the beginning, by which a receiver knows that it has opened the right memory
FEWEST, _MOST = 3, 64  # slots: one that is filled, one in use, one whose tensors are just going


class SharedSlots:
    """A number of slots of equal size. The sender makes them, the receiver attaches to its `offer`."""

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
