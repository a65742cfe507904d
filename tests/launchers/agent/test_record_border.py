"""Records that a job's own user has written: what cannot be is left out, and nothing else suffers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.agent.records import RECORD_BYTES, parse_object, parse_record, read_json
from orc.launchers.attempts.reader import read_attempts
from orc.launchers.remote.transport import LocalTransport

NONSENSE: list[Any] = ["many", 10**400, -5, 1.5, True, [], {}, [[]], "x" * 100_000, float("nan"), float("inf")]
EXIT = {"node": 0, "restart": 0, "outcome": "crash", "reason": "r", "exit_status": 3, "host": "a", "at": 5.0}
EXIT |= {
    "started_at": 1.0,
    "ended_at": 5.0,
    "lost_nodes": [],
    "ranks": {"0": {"exit_code": 3, "signal": None, "at": 5.0}},
}
FAILURE = {"rank": 0, "node": 0, "host": "a", "exit_code": 3, "signal": None, "at": 5.0, "log_tail": "t", "stall": ""}
LEASE = {"host": "a", "at": 1.0, "restart": 0, "node": 0, "marker": "m"}
BEAT = {"at": 2.0, "restart": 0, "state": "running", "progress": {"step": 1, "loss": 0.5}, "stall": ""}
RECORDS: dict[str, dict[str, Any]] = {
    "agent.json": {"nnodes": 1, "nproc": 1, "secrets": []},
    "node-0/lease.json": LEASE,
    "node-0/heartbeat.json": BEAT,
    "node-0/exit.json": EXIT | {"first_failure": FAILURE},
}
FIELDS = [(name, key) for name, record in RECORDS.items() for key in record]
FIELDS += [("node-0/exit.json", f"first_failure.{key}") for key in FAILURE]


def attempt(directory: Path, **changed: Any) -> str:
    for name, record in RECORDS.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(changed.get(name, record)))
    return str(directory)


def look(directories: list[str]) -> Any:
    """All that a poll asks of records."""
    found = read_attempts(LocalTransport(), directories)
    for records in found.values():
        seen = [
            records.verdict(),
            records.progress,
            records.states,
            records.last_sign,
            records.started_at,
            records.hosts,
        ]
        assert len(json.dumps([str(one) for one in seen])) < 60_000
        assert records.nnodes <= 10_000
    return found


@pytest.mark.parametrize(("name", "key"), FIELDS, ids=lambda one: str(one))
def test_nonsense_in_a_field_spoils_no_other_attempt(tmp_path: Path, name: str, key: str) -> None:
    good = attempt(tmp_path / "good")
    expected = look([good])[good].verdict()
    assert expected.reason == "rank 0 on a exited with 3"
    for number, value in enumerate(NONSENSE):
        outer, _, inner = key.partition(".")
        record = RECORDS[name]
        changed = record | {outer: {**record[outer], inner: value} if inner else value}
        bad = attempt(tmp_path / str(number), **{name: changed})
        assert look([bad, good])[good].verdict() == expected


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"{" + b" " * RECORD_BYTES + b"}"]
)
def test_what_is_no_record_is_none(tmp_path: Path, content: bytes) -> None:
    assert parse_record(content) is None
    (tmp_path / "a").write_bytes(content)
    assert read_json(str(tmp_path / "a")) is None


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    directory = attempt(tmp_path)
    for name in RECORDS:
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    assert read_json(f"{directory}/agent.json") is None
    assert look([directory])[directory].config is None


def test_a_loss_that_is_no_number_leaves_the_rest() -> None:
    assert parse_object(b'{"loss": NaN, "step": 3, "x": -Infinity}') == {"loss": None, "step": 3, "x": None}
    assert parse_record(b'{"progress": {"loss": NaN, "step": 3}, "at": 1}') == {
        "progress": {"loss": None, "step": 3},
        "at": 1,
    }


def test_a_million_nodes_are_no_reason_of_a_million_words() -> None:
    record = parse_record(json.dumps(EXIT | {"lost_nodes": list(range(1_000_000)), "reason": "x" * 10**6}).encode())
    assert record is not None
    assert (len(record["lost_nodes"]), len(record["reason"])) == (10_000, 4096)
