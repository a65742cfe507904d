"""Records of many attempts over several transports, and of how an attempt ended that its backend has ended itself."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from orc.launchers.agent.records import parse_object
from orc.launchers.attempts.reader import read_attempts
from orc.launchers.backends.base import Observation, cancel_request

if TYPE_CHECKING:
    from orc.launchers.attempts.reader import AttemptRecords
    from orc.launchers.remote.transport import Transport

ENDED = "ended.json"
_SIDE_BY_SIDE = 32
T = TypeVar("T")


def _ask_all(
    files: Iterable[tuple[Transport, str]], ask: Callable[[Transport, list[str]], Mapping[str, T]]
) -> dict[str, T]:
    """Return what *ask* finds over each transport for its directories, side by side: a silent one delays no other."""
    homes: dict[Transport, list[str]] = {}
    for transport, home in files:
        homes.setdefault(transport, []).append(home)
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        return {path: each for found in pool.map(ask, homes, homes.values()) for path, each in found.items()}


def read_all(files: Iterable[tuple[Transport, str]], planned: Mapping[str, int]) -> dict[str, AttemptRecords]:
    """Return the records of attempts by their directories; see `read_attempts`."""
    return _ask_all(files, lambda transport, homes: read_attempts(transport, homes, {h: planned[h] for h in homes}))


def ask_to_end(transport: Transport, home: str, grace: timedelta) -> None:
    """Tell the agents of an attempt to end it, unless all of them have."""
    if not read_attempts(transport, [home])[home].complete:
        transport.write(f"{home}/cancel.json", json.dumps(cancel_request(grace)).encode(), mode=0o600)


def write_end(transport: Transport, home: str, seen: Observation) -> None:
    """Note how an attempt has ended, before what makes it visible is removed."""
    told = replace(seen, ended_at=time.time()).to_dict()
    transport.write(f"{home}/{ENDED}", json.dumps(told).encode(), mode=0o600)


def read_ends(files: Iterable[tuple[Transport, str]]) -> dict[str, Observation]:
    """Return what `write_end` has noted, by the attempts' directories; nothing of what others put in its place."""
    wanted = ((transport, f"{home}/{ENDED}") for transport, home in files)
    found = _ask_all(wanted, lambda transport, paths: transport.read_many(paths))
    ends = {}
    for path, data in found.items():
        with contextlib.suppress(ValueError):
            if (seen := Observation.from_dict(parse_object(data) or {})).phase.ended:
                ends[path.removesuffix(f"/{ENDED}")] = seen
    return ends
