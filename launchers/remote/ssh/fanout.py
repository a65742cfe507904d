"""Bounded parallel work on many hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from orc.launchers.errors import LaunchError

A = TypeVar("A")
T = TypeVar("T")

LIMIT = 32
_LOOK_S = 0.5  # a Ctrl-C that comes between Python's last look at its signals and the wait does not wake the wait


def each(items: Mapping[str, A], work: Callable[[A], T], *, limit: int = LIMIT) -> dict[str, T | LaunchError]:
    """Return the result of *work*, or its `LaunchError`, for each item in their order; at most *limit* at a time.

    A host that cannot be reached does not hold up the others. Any other exception ends the whole: what was not begun
    is left out, and it is raised here, at once. So does Ctrl-C; what is underway then ends at its own time limit.
    """
    if len(items) == 1:
        [(name, item)] = items.items()
        return {name: _one(work, item)}
    waiting = iter(items.items())
    results: dict[str, T | LaunchError] = {}
    broken: list[BaseException] = []
    changed = threading.Condition()

    def run() -> None:
        while True:
            with changed:
                name, item = next(waiting, (None, None)) if not broken else (None, None)
            if name is None:
                return
            try:
                result = _one(work, item)  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                with changed:
                    broken.append(error)
                    changed.notify()
                return
            with changed:
                results[name] = result
                changed.notify()

    for number in range(min(limit, len(items))):
        threading.Thread(target=run, name=f"orc-hosts-{number}", daemon=True).start()
    with changed:
        try:
            while not changed.wait_for(lambda: broken or len(results) == len(items), _LOOK_S):
                pass
        except BaseException as error:  # Ctrl-C
            broken.append(error)
            raise
    if broken:
        raise broken[0]
    return {name: results[name] for name in items}


def _one(work: Callable[[A], T], item: A) -> T | LaunchError:
    try:
        return work(item)
    except LaunchError as error:
        return error
