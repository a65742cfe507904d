"""Copies of many tensors, in threads: one core alone does not keep the memory busy."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from orc.runtime.checkpoint.storage.mapped import MappedFile, mapped

_PIECE = 16 * 1024 * 1024  # bytes that one thread copies at a time
_KINDS = (torch.Tensor, torch.nn.Parameter)


class CopyQueue:
    """Copies under way. They are complete when the block ends, or after `wait`.

    Between tensors in host memory they run beside the caller; others (to and from a GPU) at once, in the caller's
    stream. Not to be used while the interpreter ends, when no thread can be started.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._files: list[MappedFile] = []
        self._pending: list[Future[None]] = []
        self._batch: list[Callable[[], object]] = []
        self._batch_size = 0

    def __enter__(self) -> CopyQueue:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            for file in self._files:
                file.close()

    def read_from(self, *paths: Path) -> None:
        """From now on read what is mapped of the files *paths* now, instead of copying the mapped memory."""
        self._files.extend(mapped(paths))

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy *source* into *target*, of the same shape; neither may change until it is done.

        What comes from a GPU is complete when that has been synchronized.
        """
        plain = type(target) in _KINDS
        target, source = target.detach(), source.detach()
        if target.device.type != "cpu" or source.device.type != "cpu":
            with torch.no_grad():
                target.copy_(source, non_blocking=target.device.type == "cpu")
            return
        alike = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        if alike and plain and self._read(target, source):
            return
        step = _PIECE // target.element_size()
        if alike and target.numel() > step:
            pieces = zip(target.view(-1).split(step), source.view(-1).split(step), strict=True)
        else:
            pieces = zip([target], [source], strict=True)
        for piece, origin in pieces:
            self._add(piece.nbytes, partial(piece.copy_, origin))

    def wait(self) -> None:
        """Wait for all; raises what went wrong."""
        self._submit()
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _read(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Start to read *target* from the file that *source* is mapped from; `False` if it is from none."""
        for file in self._files:
            offset = file.offset(source)
            if offset is None or target.shape != source.shape or target.is_neg() or target.is_conj():
                continue
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)
            for piece in target.view(-1).split(_PIECE // target.element_size()):
                self._add(piece.nbytes, partial(file.read, piece, offset))
                offset += piece.nbytes
            return True
        return False

    def _add(self, size: int, action: Callable[[], object]) -> None:
        self._batch.append(action)
        self._batch_size += size
        if self._batch_size >= _PIECE:
            self._submit()

    def _submit(self) -> None:
        batch, self._batch, self._batch_size = self._batch, [], 0
        if not batch:
            return
        if self._pool is None:
            # Where torch's own operators use several threads, one here keeps the caller free and they do the rest.
            several = torch.get_num_threads() > 1 and not self._files
            self._pool = ThreadPoolExecutor(1 if several else min(len(os.sched_getaffinity(0)), 8))
        self._pending.append(self._pool.submit(_run, batch))


# The mode is one of the thread: this one allows targets that were made in it, and others.
@torch.inference_mode()
def _run(batch: list[Callable[[], object]]) -> None:
    for action in batch:
        action()
