"""Place of a thread, read from its stack on request, so that the thread itself keeps no record of it."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# What a rank is busy with, by the innermost frame that belongs to one of these.
_ACTIVITIES = (
    ("checkpoint", ("orc/runtime/checkpoint/", "runtime/checkpoint/", "torch/distributed/checkpoint/")),
    ("collective", ("torch/distributed/", "runtime/collectives/")),
    ("backward", ("torch/autograd/",)),
    ("data", ("torch/utils/data/", "runtime/data/")),
    ("optimizer", ("torch/optim/", "runtime/train/optimizer.py")),
    ("forward", ("torch/nn/",)),
)
WAITING = ("collective", "backward")  # a rank that is there may be waiting for another one


@dataclass(frozen=True)
class Place:
    """Line of the script that a thread executes, the operation it has called there, and the kind of activity.

    Attributes:
        where: the innermost line of the script: ``train.py:31 in main``.
        line: the text of that line.
        operation: what that line has called: ``Accelerator.backward``; empty when Python cannot see it.
        activity: ``collective``, ``backward``, ``data``, ``optimizer``, ``forward``, ``checkpoint`` or ``script``.
    """

    where: str
    line: str
    operation: str
    activity: str

    def to_dict(self) -> dict[str, str]:
        """JSON-able form."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.where}: {self.line}" if self.line else self.where


@functools.cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.add(str(Path(__file__).resolve().parents[1]))
    return tuple(f"{root}{os.sep}" for root in roots)


def _is_library(filename: str) -> bool:
    return filename.startswith(("<frozen", *_library_roots())) or "/site-packages/" in filename


def _name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # 3.11


def place_of(frame: FrameType) -> Place:
    """Return the place of the thread with the innermost frame *frame*."""
    frames: list[FrameType] = []
    walk: FrameType | None = frame
    while walk is not None:
        frames.append(walk)
        walk = walk.f_back
    own = next((index for index, one in enumerate(frames) if not _is_library(one.f_code.co_filename)), len(frames) - 1)
    script = frames[own]
    called = _name(frames[own - 1].f_code) if own > 0 else ""
    activity = "script"
    for one in frames[:own]:
        name = one.f_code.co_filename.replace(os.sep, "/")
        found = next((kind for kind, parts in _ACTIVITIES if any(part in name for part in parts)), None)
        if found is not None:
            activity = found
            break
    filename, number = script.f_code.co_filename, script.f_lineno
    line = linecache.getline(filename, number, script.f_globals).strip()
    return Place(f"{filename}:{number} in {script.f_code.co_name}", line, called, activity)


def main_place() -> Place:
    """Return the place of the main thread of this process. Callable from any thread."""
    frames = sys._current_frames()
    return place_of(frames[threading.main_thread().ident or 0])


def all_stacks() -> list[dict[str, Any]]:
    """The stacks of all Python threads, outermost call first: ``{"thread": name, "frames": [lines]}``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me = threading.get_ident()
    return [
        {"thread": names.get(ident, str(ident)), "frames": [one.rstrip() for one in traceback.format_stack(frame)]}
        for ident, frame in sys._current_frames().items()
        if ident != me
    ]
