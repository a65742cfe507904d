"""Records of attempts over several transports."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import cast

from orc.launchers.backends.base import Observation, Phase
from orc.launchers.backends.ends import read_ends
from orc.launchers.remote.transport import Transport


class Meeting:
    """Transports each of which answers when all of them are asked."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def read_many(self, paths: Iterable[str]) -> dict[str, bytes]:
        self.barrier.wait(30)
        told = Observation(Phase.FAILED, reason="over", ended_at=1.0).to_dict()
        return {path: json.dumps(told).encode() for path in paths}


def test_transports_are_asked_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    files = [(cast("Transport", Meeting(barrier)), f"/a{number}") for number in range(3)]
    assert {home: seen.phase for home, seen in read_ends(files).items()} == {f"/a{n}": Phase.FAILED for n in range(3)}
