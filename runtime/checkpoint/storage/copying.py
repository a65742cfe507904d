"""Tensors from mapped files to their places, copied or read in threads: one core alone does not keep the memory busy.

`torch.load` and safetensors hand out tensors whose memory is the file: names, shapes and types are known at no cost.
Copying from there would make the whole file count as memory of the process, and a page that cannot be read any more
would end it with SIGBUS. So the mapping only says which bytes of the file a tensor is, and they are read like others.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import state_file
from orc.runtime.collectives.tree import recursively_apply

_MAPS = Path("/proc/self/maps")
Span = tuple[int, int, int]  # begin and end in memory, and where in the file it begins


class MappedFile:
    """A file that is open for reading, and the places in memory where it is mapped."""

    def __init__(self, path: Path, fd: int, spans: Sequence[Span]) -> None:
        self.path = path
        self._fd = fd
        self._spans = spans

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Return where in the file the bytes of *tensor* begin, which is contiguous; `None` if it is not mapped."""
        at, size = tensor.data_ptr(), tensor.nbytes
        for begin, end, offset in self._spans:
            if begin <= at and at + size <= end:
                return at - begin + offset
        return None

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fill *target*, contiguous and in host memory, with the bytes from *offset* on. Raises `OSError`."""
        view = memoryview(cast(Any, target.view(-1).view(torch.uint8).numpy()))
        while len(view):
            count = os.preadv(self._fd, [view], offset)
            if count == 0:
                raise OSError(errno.EIO, "it has become shorter", str(self.path))
            view, offset = view[count:], offset + count


def mapped(paths: Iterable[Path]) -> list[MappedFile]:
    """Open the files *paths*, to read what is mapped of them now; those that are not mapped are left out."""
    names = {path: os.fsencode(os.path.realpath(path)) for path in paths}
    spans = _spans(names.values()) if names else {}
    maps = []
    for path, name in names.items():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # gone: what is mapped is still there
            continue
        # Another file may have taken its place since it was mapped.
        here = spans.get((name, os.fstat(fd).st_ino))
        if here is None:
            os.close(fd)
        else:
            maps.append(MappedFile(path, fd, here))
    return maps


def _spans(names: Iterable[bytes]) -> dict[tuple[bytes, int], list[Span]]:
    """Return where files of the *names* are mapped, by name and inode."""
    spans: dict[tuple[bytes, int], list[Span]] = {}
    try:
        lines = _MAPS.read_bytes().splitlines()
    except OSError:  # there is no such file system: tensors are copied from where they are
        return {}
    endings = tuple(names)
    for line in lines:
        if not line.endswith(endings):  # of hundreds of lines, those of the libraries among them, few are wanted
            continue
        # 7f10-7f20 rw-p 00000000 fe:00 4711      /path of the file
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            begin, _, end = fields[0].partition(b"-")
            span = (int(begin, 16), int(end, 16), int(fields[2], 16))
            spans.setdefault((fields[5], int(fields[4])), []).append(span)
    return spans


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


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped into memory, with the names that share a tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            aliases = json.loads((file.metadata() or {}).get("orc.aliases", "{}"))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    for alias, name in aliases.items():
        state[alias] = state[name]
    return state


def read_state(path: Path, map_location: Any = None) -> Any:
    """Return the state in the file *path*, of either format."""
    return read_weights(path) if path.suffix == ".safetensors" else unpickle(path, map_location)


def unpickle(path: Path, map_location: Any = None) -> Any:
    """Return what was pickled to *path*, mapped unless it is for another place. Raises `CheckpointError`."""
    try:
        if map_location is None:
            return state_file.read(path, "cpu", mmap=True)
        return state_file.read(path, map_location)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def unmapped(state: Any, copies: CopyQueue, current: Any = None) -> Any:
    """*state* in memory once *copies* are: what stayed mapped would break when a network file system loses the file.

    Tensors go where the ones they replace are, if *current*, an optimizer's state, has such already: that needs no
    memory twice, and moves them to their device.
    """
    if current is None or _shape(current) != _shape(state):
        return recursively_apply(partial(_fresh, copies=copies), state)
    return _filled(state, current, copies)


def _fresh(value: torch.Tensor, copies: CopyQueue) -> torch.Tensor:
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return value.clone()
    target = torch.empty_like(value)
    copies.start(target, value)
    return target


def _shape(state: Any) -> list[int] | None:
    """Parameters in each group of an optimizer's *state*."""
    try:
        return [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        return None


def _filled(value: Any, current: Any, copies: CopyQueue) -> Any:
    if isinstance(value, torch.Tensor):
        if type(current) is not torch.Tensor or current.shape != value.shape or current.dtype != value.dtype:
            return _fresh(value, copies)
        copies.start(current, value)
        return current
    if isinstance(value, dict):
        known = current if isinstance(current, dict) else {}
        return {key: _filled(item, known.get(key), copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_filled(item, None, copies) for item in value)
    return value


def placed(state: Mapping[str, Any], model: torch.nn.Module, copies: CopyQueue) -> dict[str, Any]:
    """Return *state* with the weights of *model* in the place of those that *copies* bring there."""
    weights = dict(state)
    origins: dict[int, torch.Tensor] = {}
    for name, mine in model.state_dict(keep_vars=True).items():
        value = weights.get(name)
        if type(mine) not in (torch.Tensor, torch.nn.Parameter) or type(value) is not torch.Tensor:
            continue
        if mine.device.type != "cpu" or mine.dtype != value.dtype or mine.shape != value.shape:
            continue
        origin = origins.get(id(mine))
        if origin is None:
            origins[id(mine)] = value
            copies.start(mine, value)
        elif origin.data_ptr() != value.data_ptr():
            continue  # two values for one tensor: the last counts, as without this
        weights[name] = mine
    return weights
