"""Writers that are killed at any moment, and writers that run at the same time."""

from __future__ import annotations

import hashlib
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.scan import SourceTree, scan

# Everything through which the store changes the disk. pathlib and shutil call these too.
SYSCALLS = ("open", "write", "fsync", "mkdir", "rename", "link", "symlink", "fchmod", "utime", "rmdir", "unlink")


def in_child(work: Callable[[], object]) -> int:
    """Run *work* in a forked child and return its exit status; negative for a signal."""
    child = os.fork()
    if not child:
        status = 70
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(28, os.strerror(28))


def meet_at(step: int, fate: Callable[[], None] = die, names: Sequence[str] = SYSCALLS) -> list[str]:
    """From now on, count calls that change the disk and meet *fate* right before number *step* (0: never)."""
    calls: list[str] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def watched(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == step:
                fate()
            return real(*args, **options)

        setattr(os, name, watched)

    for name in names:
        watch(name)
    return calls


def check(store: ContentStore) -> None:
    """Everything that a reader can see is complete."""
    if (store.root / "cas").is_dir():
        for path in (store.root / "cas").iterdir():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    if (store.root / "trees").is_dir():
        for path in (store.root / "trees").iterdir():
            if path.suffix == ".json":
                assert store.verify(path.stem) == []
            else:
                assert scan(path).digest == path.name


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of times here. What a killed process has written is there for the others, durable or not."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def source(tmp_path: Path) -> SourceTree:
    root = tmp_path / "tree"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("print('train')\n")
    (root / "pkg/net.py").write_text("x = 1\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "latest").symlink_to("pkg")
    return scan(root)


def test_a_writer_killed_at_any_system_call_leaves_nothing_partial(tmp_path: Path, source: SourceTree) -> None:
    whole = tmp_path / "whole/store"
    counted = tmp_path / "calls"

    def count() -> None:
        calls = meet_at(0)
        ContentStore(whole).ingest(source)
        counted.write_text(" ".join(calls))

    assert in_child(count) == 0
    calls = counted.read_text().split()
    assert set(calls) >= {"open", "write", "fsync", "mkdir", "rename", "link", "symlink"}

    for step in range(1, len(calls) + 1):
        store = ContentStore(tmp_path / f"killed-{step}/store")

        def killed(store: ContentStore = store, step: int = step) -> None:
            meet_at(step)
            store.ingest(source)

        assert in_child(killed) == -signal.SIGKILL, calls[step - 1]
        check(store)
        # The next one finishes the work, whatever the first one left.
        store.ingest(source)
        check(store)
        assert store.has(source.digest)


def test_a_snapshot_exists_from_its_manifest_on(tmp_path: Path, source: SourceTree) -> None:
    store = ContentStore(tmp_path / "store")
    store.ingest(source)
    (store.root / f"trees/{source.digest}.json").unlink()  # as left by a kill between the two renames
    assert not store.has(source.digest)
    store.ingest(source)
    assert store.has(source.digest)
    assert os.listdir(store.root / "tmp") == []


def test_writers_of_the_same_and_of_overlapping_trees_run_side_by_side(tmp_path: Path) -> None:
    shared = tmp_path / "trees"
    for number in range(2):
        for name in range(100):
            path = shared / str(number) / f"d{name % 7}" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"x = {name if name < 90 else (number, name)}\n")
    sources = [scan(shared / "0"), scan(shared / "0"), scan(shared / "1"), scan(shared / "1")]
    for round_ in range(5):
        store = ContentStore(tmp_path / f"store-{round_}")
        reader, writer = os.pipe()
        children = []
        for source in sources:
            child = os.fork()
            if not child:
                status = 70
                try:
                    os.close(writer)
                    os.read(reader, 1)  # all start when the pipe closes
                    store.ingest(source)
                    status = 0 if store.verify(source.digest) == [] else 71
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(child)
        os.close(reader)
        os.close(writer)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0, 0]
        check(store)
        assert os.listdir(store.root / "tmp") == []
        assert len([n for n in os.listdir(store.root / "trees") if not n.endswith(".json")]) == 2


def test_a_writer_that_fails_at_any_system_call_says_so_and_leaves_nothing(tmp_path: Path, source: SourceTree) -> None:
    """A full disk can show up in every call that writes, not only in `write`."""

    for step in range(1, 200):
        store = ContentStore(tmp_path / f"failed-{step}/store")

        def work(store: ContentStore = store, step: int = step) -> None:
            meet_at(step, fail, ("write", "fsync", "mkdir", "rename", "link", "symlink"))
            try:
                store.ingest(source)
            except BundleError as error:
                message = str(error)
            else:
                return
            assert "no space for the snapshot" in message
            assert not (store.root / "tmp").is_dir() or os.listdir(store.root / "tmp") == []
            os._exit(3)

        status = in_child(work)
        check(store)
        if status == 0:
            assert step > 20
            return
        assert status == 3
    pytest.fail("the store makes more calls than this test tries")
