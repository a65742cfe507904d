"""The way between a container and an object store, and what the store holds of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orc.launchers.containers import mirror, program
from orc.launchers.containers.objects import UrlObjects, UrlTransport
from orc.launchers.errors import BackendError, BackendUnreachable


class Store:
    """Objects in memory, and the order in which they were written."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.written: list[str] = []

    def pipe_file(self, path: str, data: bytes) -> None:
        self.objects[path] = data
        self.written.append(path)

    def cat_file(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def push(tmp_path: Path, store: Store) -> Any:
    """``push(node)``: that node's files, on their way to ``top``."""
    config = {"backend": {"store": "mem://top"}, "job_dir": str(tmp_path / "job"), "logs_dir": str(tmp_path / "logs")}
    config["attempt_dir"] = str(tmp_path / "job" / "a1")
    for name in ("job/a1/node-0/exit.json", "job/a1/node-1/exit.json", "job/a1/agent.json", "job/a1/secrets.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("hello\n")
    (tmp_path / "job" / "metrics.jsonl").write_text("{}")
    s3 = SimpleNamespace(SCHEMES=("mem",), open_url=lambda url: (store, "top"))
    return lambda node: mirror.Push(s3, config, node)


def test_a_node_sends_its_own_files_nothing_private_and_its_exit_record_last(push: Any, store: Store) -> None:
    push(0).round()
    assert store.written == [
        "top/a1/logs/rank-0.log",
        "top/a1/agent.json",
        "top/metrics.jsonl",
        "top/a1/node-0/exit.json",
    ]
    store.written.clear()
    push(1).round()
    assert store.written == ["top/a1/logs/rank-0.log", "top/a1/node-1/exit.json"]


def test_only_what_has_changed_is_sent_again_and_a_large_log_less_often(
    push: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(mirror.time, "monotonic", lambda: now[0])
    sender, log = push(0), tmp_path / "logs" / "rank-0.log"
    sender.round()
    store.written.clear()
    sender.round()
    assert store.written == []
    log.write_bytes(b"x" * (3 << 20))
    now[0] += 2
    sender.round()
    assert store.written == []
    now[0] += 2
    sender.round()
    assert store.written == ["top/a1/logs/rank-0.log"]
    log.write_bytes(b"y" * (4 << 20))
    sender.round(final=True)
    assert store.objects["top/a1/logs/rank-0.log"][:1] == b"y"


def test_the_first_node_is_told_that_the_attempt_is_to_end(push: Any, store: Store, tmp_path: Path) -> None:
    store.objects["top/a1/cancel.json"] = b'{"grace_s": 5}'
    push(1).round()
    assert not (tmp_path / "job" / "a1" / "cancel.json").exists()
    push(0).round()
    assert json.loads((tmp_path / "job" / "a1" / "cancel.json").read_bytes()) == {"grace_s": 5}


def test_an_error_that_only_a_driver_knows_is_tried_again_here_and_out_of_reach_there(
    push: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HttpError(Exception):
        """As gcsfs has one."""

    answers = iter([HttpError("502"), None])

    def put(path: str, data: bytes) -> None:
        if error := next(answers, None):
            raise error
        store.objects[path] = data

    monkeypatch.setattr(store, "pipe_file", put)
    monkeypatch.setattr(mirror, "ROUND_S", 0.0)
    monkeypatch.setattr(mirror.select, "select", lambda *_: ([0], [], []))  # the agent has ended
    assert push(1).run() == 0
    assert "top/a1/node-1/exit.json" in store.objects

    def refuse(*_: object) -> Any:
        raise HttpError

    monkeypatch.setattr("orc.launchers.containers.objects.open_url", refuse)
    with pytest.raises(BackendUnreachable, match="HttpError"):
        UrlObjects().get("gs://bucket/a")


def test_a_store_without_its_library_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    def missing(url: str) -> Any:
        raise ImportError("it needs boto3: pip install boto3")

    s3 = SimpleNamespace(SCHEMES=("s3",), open_url=missing)
    assert mirror.main(s3, ["fetch", "s3://bucket/a", "/nowhere/a"]) == 1
    assert capsys.readouterr().err == "it needs boto3: pip install boto3\n"


def test_the_last_words_of_a_node_fit_and_lose_what_only_people_read_first(tmp_path: Path) -> None:
    node = tmp_path / "node-1"
    node.mkdir()
    failure = {"rank": 3, "log_tail": "early\n" * 2000 + "ValueError: nan"}
    record = {
        "node": 1,
        "outcome": "crash",
        "first_failure": failure,
        "ranks": {str(n): {"exit_code": 1} for n in range(9)},
    }
    (node / "exit.json").write_text(json.dumps(record))
    (node / "lease.json").write_text(json.dumps({"host": "pod-1", "at": 1.0}))
    text = program.report_of(str(tmp_path), 1)
    found = json.loads(text)
    assert len(text) <= 4096
    assert found["exit"]["first_failure"]["log_tail"].endswith("ValueError: nan")
    assert (len(found["exit"]["ranks"]), found["lease"]["host"]) == (9, "pod-1")
    record["ranks"] = {str(n): {"exit_code": 1} for n in range(999)}
    (node / "exit.json").write_text(json.dumps(record))
    assert json.loads(program.report_of(str(tmp_path), 1))["exit"]["outcome"] == "crash"


def test_only_a_node_whose_end_is_recorded_has_said_all_and_others_do_not_cover_up_a_failure(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text("the agent ended with status 137 and left no record")
    assert not program.leave_report(str(report), str(tmp_path), 1)
    assert report.read_text().startswith("the agent ended with status 137")
    for record, is_said in (("lease", False), ("exit", True)):
        (tmp_path / "node-1").mkdir(exist_ok=True)
        (tmp_path / "node-1" / f"{record}.json").write_text('{"host": "pod-1"}')
        assert program.leave_report(str(report), str(tmp_path), 1) is is_said
        assert json.loads(report.read_text())[record] == {"host": "pod-1"}


def test_a_store_of_fsspec_is_read_and_written_like_a_directory() -> None:
    top = f"memory://orc-{os.getpid()}"
    files, objects = UrlTransport("store"), UrlObjects()
    files.write(f"{top}/a1/logs/rank-0.log", b"hello")
    assert files.read(f"{top}/a1/logs/rank-0.log", offset=1, limit=3) == b"ell"
    assert files.read(f"{top}/a1/logs/rank-0.log", offset=9) == b""
    assert files.names(f"{top}/a1/logs") == ["rank-0.log"]
    assert files.names(f"{top}/nothing") == []
    wanted = [f"{top}/a1/logs/rank-0.log", f"{top}/nothing"]
    assert files.read_many(wanted) == {wanted[0]: b"hello"}
    assert files.read_many(wanted, limit=4) == {}
    with pytest.raises(FileNotFoundError):
        files.read(f"{top}/nothing")
    assert objects.exists(wanted[0])
    files.remove(wanted[0])
    files.remove(wanted[0])
    assert not objects.exists(wanted[0])
    with pytest.raises(BackendError, match="no command runs in an object store"):
        files.run(["ls"])
    with pytest.raises(BackendError, match="nowhere"):
        objects.get("nowhere://bucket/a")
