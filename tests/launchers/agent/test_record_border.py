"""Records that a job's own user has written: what cannot be is left out, and nothing else suffers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.agent.processes import kill_attempt
from orc.launchers.agent.records import RECORD_BYTES, parse_object, parse_record, read_json
from orc.launchers.attempts.reader import read_attempts
from orc.launchers.backends.slurm.submission import ArrayElement, elements_of, job_of_owner, record_of
from orc.launchers.backends.ssh import host_program
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
            records.verdict,
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
    expected = look([good])[good].verdict
    assert expected.reason == "rank 0 on a exited with 3"
    for number, value in enumerate(NONSENSE):
        outer, _, inner = key.partition(".")
        record = RECORDS[name]
        changed = record | {outer: {**record[outer], inner: value} if inner else value}
        bad = attempt(tmp_path / str(number), **{name: changed})
        assert look([bad, good])[good].verdict == expected


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


def fifo(path: Path) -> None:
    os.mkfifo(path)


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


def socket_file(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as own:  # longer paths are refused
        own.bind(path.name)


NO_FILES = [fifo, Path.mkdir, large, endless, loop, socket_file]


@pytest.mark.parametrize("make", NO_FILES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", RECORDS)
def test_whatever_lies_in_the_place_of_a_record_spoils_no_other_attempt(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    good, bad = attempt(tmp_path / "good"), attempt(tmp_path / "bad")
    (tmp_path / "bad" / name).unlink()
    make(tmp_path / "bad" / name)
    assert look([bad, good])[good].verdict.reason == "rank 0 on a exited with 3"
    answers = host_program.status({"host": "a", "directories": [bad, good, str(tmp_path / "none")]})["attempts"]
    assert answers[good]["records"].keys() == {name for name in RECORDS if name != "agent.json"}
    assert len(json.dumps(answers[bad])) < 100_000


@pytest.mark.parametrize(("name", "key"), FIELDS, ids=lambda one: str(one))
def test_nonsense_in_a_field_keeps_no_host_from_telling_of_other_attempts(tmp_path: Path, name: str, key: str) -> None:
    good = attempt(tmp_path / "good")
    for number, value in enumerate(NONSENSE):
        outer, _, inner = key.partition(".")
        changed = RECORDS[name] | {outer: {**RECORDS[name][outer], inner: value} if inner else value}
        bad = attempt(tmp_path / str(number), **{name: changed})
        answer = host_program.status({"host": "a", "directories": [bad, good]})
        assert answer["attempts"][good]["records"]["node-0/exit.json"]["exit_status"] == 3
        kill_attempt(bad)  # its `pids.json` is not there


@pytest.mark.parametrize("noted", [5, {"sessions": 5}, {"sessions": [5, {}, {"pid": "x"}, {"pid": 10**19}]}])
def test_nonsense_in_what_was_noted_of_processes_ends_none(tmp_path: Path, noted: Any) -> None:
    directory = attempt(tmp_path, **{"node-0/exit.json": EXIT})
    (tmp_path / "node-0" / "pids.json").write_text(json.dumps(noted))
    assert kill_attempt(directory) == 0


def test_a_part_is_flat_and_small() -> None:
    deep: Any = {"step": 1}
    for _ in range(400):
        deep = {"progress": deep, "ranks": {"0": deep}} if _ < 3 else {"progress": deep}
    record = parse_record(json.dumps({"progress": {**deep, "step": 7, "more": [1], "own": "x" * 10_000}}).encode())
    assert record == {"progress": {"step": 7, "own": "x" * 4096}}
    many = parse_record(json.dumps({"progress": {str(number): 1 for number in range(10_000)}}).encode())
    assert many is not None
    assert len(many["progress"]) == 100


def test_ranks_have_numbers_of_a_length() -> None:
    record = parse_record(
        json.dumps({"ranks": {"1" * 5000: {}, "-1": {}, "\u0661": {}, "7": {"exit_code": 1}}}).encode()
    )
    assert record == {"ranks": {"7": {"exit_code": 1}}}


def test_texts_and_numbers_are_such_as_a_ledger_and_json_take(tmp_path: Path) -> None:
    record = parse_record(b'{"reason": "a\\ud800\\u0000b", "progress": {"step": 1e999, "x\\ud800": "\\ud800"}}')
    assert record == {"reason": "a?\ufffdb", "progress": {"step": None, "x?": "?"}}
    json.dumps(record, allow_nan=False).encode()


def test_a_job_has_no_more_nodes_than_its_plan(tmp_path: Path) -> None:
    class Counting(LocalTransport):
        asked = 0

        def read_many(self, paths: Iterable[str], *, limit: int = RECORD_BYTES) -> dict[str, bytes]:
            wanted = list(paths)
            self.asked += len(wanted)
            return super().read_many(wanted, limit=limit)

    directory = attempt(tmp_path, **{"agent.json": {"nnodes": 9_999}})
    transport = Counting()
    (records,) = read_attempts(transport, [directory], {directory: 1}).values()
    assert transport.asked == 6
    assert records.complete


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


@pytest.mark.parametrize(
    ("owner", "job"),
    [
        ("slurm:17", "17"),
        ("slurm:17_3", "17_3"),
        *(
            (owner, "")
            for owner in ("", "slurm:", "local:17", "slurm:1,2", "slurm:--all", "slurm:1_2_3", "slurm:" + "9" * 99)
        ),
    ],
)
def test_a_lease_names_one_job_of_slurm_or_none(owner: str, job: str) -> None:
    """What it names is asked of the controller together with the jobs of everybody else."""
    assert job_of_owner(owner) == job


@pytest.mark.parametrize(
    "record", [b"", b"[]", b'{"elements": 5}', b'{"elements": [5]}', b"[" * 100_000, b'{"elements": [{"index": 1}]}']
)
def test_what_is_no_array_has_no_elements(record: bytes) -> None:
    assert elements_of(record) == []


def test_elements_are_of_arrays_that_orc_names() -> None:
    good = ArrayElement("orc-array-0123456789abcdef", 1)
    named = [{"array": name, "index": 1} for name in ("--all", "a,b", "x" * 1000, good.array)]
    assert elements_of(json.dumps({"elements": named}).encode()) == [good]
    assert len(elements_of(record_of([good] * 10_000))) == 100
