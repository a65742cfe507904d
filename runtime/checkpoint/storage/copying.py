"""Copies of many tensors, in threads: one core alone does not keep the memory busy."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_PIECE = 16 * 1024 * 1024  # bytes that one thread copies at a time


class Copies:
    """Copies under way. They are complete when the block ends, or after `wait`.

    Between tensors in host memory they run beside the caller; others (to and from a GPU) at once, in the caller's
    stream. Not to be used while the interpreter ends, when no thread can be started.
    """

    def __init__(self) -> None:
        # Where torch's own operators use several threads, one here keeps the caller free and they do the rest.
        several = torch.get_num_threads() > 1
        self._pool = ThreadPoolExecutor(1 if several else min(len(os.sched_getaffinity(0)), 8))
        self._pending: list[Future[None]] = []
        self._batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._batch_size = 0

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy *source* into *target*, of the same shape; neither may change until it is done.

        What comes from a GPU is complete when that has been synchronized.
        """
        target, source = target.detach(), source.detach()
        if target.device.type != "cpu" or source.device.type != "cpu":
            with torch.no_grad():
                target.copy_(source, non_blocking=target.device.type == "cpu")
            return
        alike = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        step = _PIECE // target.element_size()
        if alike and target.numel() > step:
            pieces = zip(target.view(-1).split(step), source.view(-1).split(step), strict=True)
        else:
            pieces = zip([target], [source], strict=True)
        for piece in pieces:
            self._batch.append(piece)
            self._batch_size += piece[0].nbytes
            if self._batch_size >= _PIECE:
                self._submit()

    def wait(self) -> None:
        """Wait for all; raises what went wrong."""
        self._submit()
        pending, self._pending = self._pending, []
        for one in pending:
            one.result()

    def _submit(self) -> None:
        batch, self._batch, self._batch_size = self._batch, [], 0
        if batch:
            self._pending.append(self._pool.submit(_copy, batch))


# The mode is one of the thread: this one allows targets that were made in it, and others.
@torch.inference_mode()
def _copy(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in batch:
        target.copy_(source)
