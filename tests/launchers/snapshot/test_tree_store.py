"""Locks of the store: what dead writers left goes, what living ones need stays, and collecting waits for writing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.snapshot import tree_store
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.scan import scan
from orc.launchers.snapshot.tree_store import TreeStore


@pytest.fixture
def store(tmp_path: Path) -> TreeStore:
    return TreeStore(tmp_path / "state/store")


def staged_and_killed(store: TreeStore) -> None:
    """What a writer leaves that is killed in the middle of its work."""
    child = os.fork()
    if not child:
        with store.staging("killed") as staging:
            (staging / "objects/content").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def left(store: TreeStore) -> list[str]:
    return [name.partition("-")[0] for name in sorted(os.listdir(store.root / "tmp"))]


def test_what_a_killed_writer_left_goes_with_the_next_one(store: TreeStore) -> None:
    staged_and_killed(store)
    assert left(store) == ["killed"]
    with store.staging("next"):
        assert left(store) == ["next"]
    assert left(store) == []


def test_the_work_of_a_living_writer_stays(store: TreeStore) -> None:
    with store.staging("first") as first, store.staging("second"):
        assert left(store) == ["first", "second"]
        assert (first / "objects").is_dir()


def test_what_another_machine_left_stays_for_a_day(store: TreeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its locks may not be seen here."""
    monkeypatch.setattr(tree_store, "_machine", lambda: "another")
    staged_and_killed(store)
    monkeypatch.undo()
    with store.staging("next"):
        assert left(store) == ["killed", "next"]
    os.utime(next((store.root / "tmp").iterdir()), (time.time() - 90_000,) * 2)
    with store.staging("next"):
        assert left(store) == ["next"]


def test_collecting_waits_for_writers_and_writers_for_collecting(store: TreeStore) -> None:
    with store.staging("writer"), store.exclusive(0.1) as alone:
        assert alone is False
    with store.staging("writer"), store.staging("another"):
        pass
    entered = threading.Event()

    def write() -> None:
        with store.staging("writer"):
            entered.set()

    writer = threading.Thread(target=write)
    with store.exclusive(0.1) as alone:
        assert alone is True
        writer.start()
        assert not entered.wait(0.2)
    assert entered.wait(60)
    writer.join()


def test_a_file_system_without_locks_will_do(store: TreeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with store.exclusive(0.1) as alone:
        assert alone is None
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/train.py").write_text("print()\n")
    content = ContentStore(store.root)
    digest = content.ingest(scan(tmp_path / "tree")).digest
    assert content.verify(digest) == []
    assert left(store) == []


def test_use_is_remembered_but_not_written_every_time(store: TreeStore, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    digest = ContentStore(store.root).snapshot(tmp_path / "tree").digest
    path = store.manifest_path(digest)
    os.utime(path, (1, 1))
    assert store.use(digest)
    used = path.stat().st_mtime_ns
    assert used / 1e9 > time.time() - 60
    assert store.use(digest)
    assert path.stat().st_mtime_ns == used
    assert not store.use("0" * 64)
