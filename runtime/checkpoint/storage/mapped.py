"""Files that are mapped into memory by libraries, read without touching the mapping.

`torch.load` and safetensors hand out tensors whose memory is the file. Copying from there makes the whole file count as
memory of the process, and a page that cannot be read any more ends it with SIGBUS. So the mapping only says which bytes
of the file a tensor is, and they are read into their place like any others.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

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
