"""Records of attempts over several transports."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import cast

import pytest

from orc.launchers.attempts.records import AttemptExit, Cause, RankFailure
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


class Forged:
    """Transport of an attempt whose job has written the record of its end itself."""

    def __init__(self, record: object) -> None:
        self.data = json.dumps(record).encode()

    def read_many(self, paths: Iterable[str]) -> dict[str, bytes]:
        return dict.fromkeys(paths, self.data)


def _read(record: object) -> dict[str, Observation]:
    return read_ends([(cast("Transport", Forged(record)), "/a")])


ENDED = Observation(
    Phase.FAILED,
    Cause.CRASH,
    "over",
    AttemptExit(
        False, Cause.CRASH, "over", 1, RankFailure(1, 0, "n0", 1, None), 1.0, 2.0, ("n0",), ranks={1: {"pid": 7}}
    ),
    ("n0", "n1"),
    started_at=1.0,
    failed_hosts=("n1",),
    progress={"step": 3},
)


def test_an_end_is_read_as_it_was_noted() -> None:
    assert _read(ENDED.to_dict()) == {"/a": ENDED}


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"hosts": 5},
        {"phase": "gone"},
        {"phase": "running"},
        {"phase": "failed", "cause": [1]},
        {"phase": "failed", "exit": [1]},
        {"phase": "failed", "exit": {"hosts": 5}},
    ],
)
def test_a_record_that_tells_no_end_is_ignored(record: object) -> None:
    assert _read(record) == {}


def test_of_an_end_that_a_job_has_written_what_cannot_be_is_left_out() -> None:
    names = {"hosts": 5, "failed_hosts": [{}, "n1"]}
    wrong = {**names, "started_at": "x", "reason": 5, "progress": 1, "restarts": 10**19, "more": 1}
    assert _read({"phase": "failed", **wrong}) == {"/a": Observation(Phase.FAILED, failed_hosts=("n1",))}


def test_transports_are_asked_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    files = [(cast("Transport", Meeting(barrier)), f"/a{number}") for number in range(3)]
    assert {home: seen.phase for home, seen in read_ends(files).items()} == {f"/a{n}": Phase.FAILED for n in range(3)}
