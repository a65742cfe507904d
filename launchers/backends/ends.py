"""Records of many attempts over several transports, and of how an attempt ended that its backend has ended itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from orc.launchers.attempts.reader import read_attempts
from orc.launchers.backends.base import Cause, Observation, Phase, cancel_request

if TYPE_CHECKING:
    from orc.launchers.attempts.reader import AttemptRecords
    from orc.launchers.remote.transport import Transport

ENDED = "ended.json"


def _by_transport(files: Iterable[tuple[Transport, str]]) -> dict[Transport, list[str]]:
    found: dict[Transport, list[str]] = {}
    for transport, home in files:
        found.setdefault(transport, []).append(home)
    return found


def read_all(files: Iterable[tuple[Transport, str]], planned: Mapping[str, int]) -> dict[str, AttemptRecords]:
    """Return the records of attempts by their directories; see `read_attempts`."""
    return {
        home: records
        for transport, homes in _by_transport(files).items()
        for home, records in read_attempts(transport, homes, {home: planned[home] for home in homes}).items()
    }


def ask_to_end(transport: Transport, home: str, grace: timedelta) -> None:
    """Tell the agents of an attempt to end it, unless all of them have."""
    if not read_attempts(transport, [home])[home].complete:
        transport.write(f"{home}/cancel.json", json.dumps(cancel_request(grace)).encode(), mode=0o600)


def write_end(transport: Transport, home: str, seen: Observation) -> None:
    """Note how an attempt has ended, before what makes it visible is removed."""
    told = {"phase": seen.phase, "cause": seen.cause, "reason": seen.reason, "at": time.time()}
    transport.write(f"{home}/{ENDED}", json.dumps(told).encode(), mode=0o600)


def read_ends(files: Iterable[tuple[Transport, str]]) -> dict[str, Observation]:
    """Return what `write_end` has noted, by the attempts' directories."""
    found = {}
    for transport, homes in _by_transport(files).items():
        for path, data in transport.read_many([f"{home}/{ENDED}" for home in homes]).items():
            told = json.loads(data)
            cause = Cause(told["cause"]) if told["cause"] else None
            seen = Observation(Phase(told["phase"]), cause, told["reason"], ended_at=told["at"])
            found[path.removesuffix(f"/{ENDED}")] = seen
    return found
