"""CallSite of a thread, read from its stack on request, so that the thread itself keeps no record of it."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from dataclasses import asdict, dataclass
from itertools import islice
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
WAITING = ("collective", "backward", "synchronize")  # a rank that is there may be waiting for another one
# What waits for the device, and so for the collectives that it has in front of it.
_WAITS_FOR_DEVICE = re.compile(r"item|tolist|cpu|numpy|float|int|bool|\w*synchronize")


@dataclass(frozen=True)
class CallSite:
    """Line of the script that a thread executes, the operation it has called there, and the kind of activity.

    Attributes:
        where: the innermost line of the script: ``train.py:31 in main``.
        line: the text of that line.
        operation: what that line has called: ``Accelerator.backward``; empty when Python cannot see it.
        activity: ``collective``, ``synchronize`` (with the device), ``backward``, ``data``, ``optimizer``, ``forward``,
            ``checkpoint`` or ``script``.
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


def call_site_of(frame: FrameType) -> CallSite:
    """Return the place of the thread with the innermost frame *frame*."""
    frames: list[FrameType] = []
    walk: FrameType | None = frame
    while walk is not None:
        frames.append(walk)
        walk = walk.f_back
    own = next(
        (index for index, frame in enumerate(frames) if not _is_library(frame.f_code.co_filename)), len(frames) - 1
    )
    script = frames[own]
    called = _name(frames[own - 1].f_code) if own > 0 else ""
    activity = "script"
    for outer in frames[:own]:
        name = outer.f_code.co_filename.replace(os.sep, "/")
        matching = next((kind for kind, parts in _ACTIVITIES if any(part in name for part in parts)), None)
        if matching is not None:
            activity = matching
            break
    if activity != "collective" and waits_for_device(frame):
        activity = "synchronize"
    filename, number = script.f_code.co_filename, script.f_lineno
    line = linecache.getline(filename, number, script.f_globals).strip()
    return CallSite(f"{filename}:{number} in {script.f_code.co_name}", line, called, activity)


def waits_for_device(frame: FrameType) -> bool:
    """Return whether the innermost *frame* is in C that waits for the device: ``loss.item()``, ``if loss > 1:``.

    Python has no frame of such a call; the instruction that runs knows its place in the source (Python 3.11).
    """
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None or frame.f_lasti < 0:
        return False
    if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("TO_BOOL", "POP_JUMP_IF", "POP_JUMP_FORWARD_IF")):
        return True
    first, last, begin, end = next(islice(positions(), frame.f_lasti // 2, None))
    if None in (first, last, begin, end):
        return False
    lines = [
        linecache.getline(frame.f_code.co_filename, number, frame.f_globals).rstrip("\n").encode()
        for number in range(first, last + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        call = ast.parse(b"(" + b"\n".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):  # the file is not the one that runs any more
        return False
    function = call.func if isinstance(call, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return _WAITS_FOR_DEVICE.fullmatch(name) is not None


def main_call_site() -> CallSite:
    """Return the place of the main thread of this process. Callable from any thread."""
    frames = sys._current_frames()
    return call_site_of(frames[threading.main_thread().ident or 0])


def all_stacks() -> list[dict[str, Any]]:
    """The stacks of all Python threads, outermost call first: ``{"thread": name, "frames": [lines]}``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me = threading.get_ident()
    return [
        {"thread": names.get(ident, str(ident)), "frames": [entry.rstrip() for entry in traceback.format_stack(frame)]}
        for ident, frame in sys._current_frames().items()
        if ident != me
    ]
