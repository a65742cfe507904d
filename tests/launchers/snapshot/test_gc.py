"""Garbage collection: what nobody needs goes, what somebody may need stays, whatever else happens."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path

import pytest

from orc.launchers.errors import BundleError
from orc.launchers.snapshot import gc, presence
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.gc import GcReport, GcRequest, collect
from orc.launchers.snapshot.manifest import SYMLINK
from orc.launchers.snapshot.scan import Bundle

DAY = 86400.0
ENVIRONMENT = "ab" * 16


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "laptop"


@pytest.fixture
def other(tree: Path, store: ContentStore, code: Bundle) -> Bundle:
    """A second snapshot; of its files one is not in the first, and the other way round."""
    (tree / "train.py").write_text("print('other')\n")
    return store.snapshot(tree).bundle


def age(store: ContentStore, *bundles: Bundle, days: float = 30) -> None:
    for bundle in bundles:
        at = time.time() - days * DAY
        os.utime(store.manifest_path(bundle.digest), (at, at))


def ask(root: Path, **options: object) -> GcReport:
    given = {"older_than_s": 7 * DAY, **options}
    return collect(GcRequest(str(root), **given))  # type: ignore[arg-type]


def attempt(root: Path, job: str, *bundles: Bundle, ended_days_ago: float | None = None, mentions: str = "") -> Path:
    """What an attempt leaves behind."""
    directory = root / "jobs" / job / "a1"
    (directory / "node-0").mkdir(parents=True)
    trees = [f"{root}/store/trees/{bundle.digest}" for bundle in bundles]
    (directory / "agent.json").write_text(json.dumps({"code_tree": trees[0], "runtime_tree": trees[-1]}))
    (directory / "node-0/lease.json").write_text("{}")
    (directory / "node-0/environment.json").write_text(json.dumps({"directory": mentions}))
    if ended_days_ago is not None:
        record = directory / "node-0/exit.json"
        record.write_text("{}")
        os.utime(record, (time.time() - ended_days_ago * DAY,) * 2)
    return directory


def test_what_was_not_used_for_long_is_removed_with_its_contents(
    root: Path, store: ContentStore, code: Bundle, other: Bundle
) -> None:
    age(store, code)
    found = ask(root)
    assert found.snapshots == [code.digest]
    assert (found.contents, found.kept) == (1, 1)
    assert found.size == code.by_path["train.py"].size
    assert not store.has(code.digest)
    assert not store.tree_path(code.digest).exists()
    assert store.verify(other.digest) == []
    assert os.listdir(store.root / "tmp") == []
    needed = {entry.sha256 for entry in other.entries if entry.mode != SYMLINK}
    assert set(os.listdir(store.root / "cas")) == needed


def test_a_dry_run_says_the_same_and_changes_nothing(
    root: Path, store: ContentStore, code: Bundle, other: Bundle
) -> None:
    age(store, code)
    before = sorted(map(str, root.rglob("*")))
    said = ask(root, dry_run=True)
    assert sorted(map(str, root.rglob("*"))) == before
    assert said == ask(root)


def test_what_the_ledger_names_is_kept(root: Path, store: ContentStore, code: Bundle, other: Bundle) -> None:
    age(store, code, other)
    assert ask(root, keep=frozenset({code.digest})).snapshots == [other.digest]
    assert store.verify(code.digest) == []


def test_use_keeps_a_snapshot(root: Path, store: ContentStore, code: Bundle) -> None:
    age(store, code)
    assert store.use(code.digest)
    assert ask(root).snapshots == []


def test_a_delivery_does_not_count_on_a_snapshot_while_a_collection_runs(root: Path, code: Bundle) -> None:
    asked = {"root": str(root), "digests": [code.digest]}
    collecting = presence.open_lock(str(root / "store"))
    presence.locked(collecting, fcntl.LOCK_EX)
    began = time.monotonic()
    assert presence.answer(asked)["have"] == [], "it is asked for by the receiver, which waits"
    assert presence.answer({**asked, "dry_run": True})["have"] == [code.digest]
    assert time.monotonic() - began < 10
    os.close(collecting)
    assert presence.answer(asked)["have"] == [code.digest]


@pytest.mark.parametrize(("minutes", "kept"), [(30, True), (90, False)])
def test_an_hour_of_grace_cannot_be_asked_away(
    root: Path, store: ContentStore, code: Bundle, minutes: int, kept: bool
) -> None:
    age(store, code, days=minutes / 1440)
    ask(root, older_than_s=0)
    assert store.has(code.digest) == kept


@pytest.mark.parametrize(
    ("ended_days_ago", "kept"), [(None, True), (1, True), (8, False)], ids=["runs", "ended lately", "ended long ago"]
)
def test_what_an_attempt_uses_is_kept_until_it_has_ended_for_long(
    root: Path, store: ContentStore, code: Bundle, ended_days_ago: float | None, kept: bool
) -> None:
    """Another ledger's, perhaps: a scheduler may requeue it, its owner may retry it."""
    age(store, code)
    attempt(root, "digits-k3f9a2", code, ended_days_ago=ended_days_ago)
    ask(root)
    assert store.has(code.digest) == kept


def test_an_attempt_that_has_not_begun_is_kept(root: Path, store: ContentStore, code: Bundle) -> None:
    """It may wait in a queue for weeks."""
    age(store, code)
    (attempt(root, "digits-k3f9a2", code) / "node-0/lease.json").unlink()
    ask(root)
    assert store.has(code.digest)


def test_a_job_that_the_ledger_knows_to_have_ended_needs_nothing(root: Path, store: ContentStore, code: Bundle) -> None:
    age(store, code)
    attempt(root, "digits-k3f9a2", code)  # lost: it left no exit record
    ask(root, ended=frozenset({"digits-k3f9a2"}))
    assert not store.has(code.digest)


def test_a_damaged_manifest_keeps_all_contents_and_is_told(
    root: Path, store: ContentStore, code: Bundle, other: Bundle
) -> None:
    age(store, code)
    store.manifest_path(other.digest).write_text("{")
    found = ask(root)
    assert found.snapshots == [code.digest]
    assert found.contents == 0
    assert str(store.manifest_path(other.digest)) in found.problems[0]


def test_a_tree_without_a_manifest_is_removed_when_old(root: Path, store: ContentStore, code: Bundle) -> None:
    store.manifest_path(code.digest).unlink()
    assert ask(root).snapshots == []
    os.utime(store.tree_path(code.digest), (0, 0))
    assert ask(root).snapshots == [code.digest]
    assert not store.tree_path(code.digest).exists()


def test_a_root_that_does_not_exist_is_fine(tmp_path: Path) -> None:
    assert ask(tmp_path / "nowhere") == GcReport()
    assert not (tmp_path / "nowhere").exists()


# --- others at work ---------------------------------------------------------------------------------------------------


def test_it_waits_for_writers_and_gives_up(
    root: Path, store: ContentStore, code: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "_WRITERS_S", 0.2)
    age(store, code)
    with store.staging("x"), pytest.raises(BundleError, match="another process is writing"):
        ask(root)
    assert store.has(code.digest)
    assert ask(root).snapshots == [code.digest]


def test_storing_and_collecting_at_the_same_time_never_breaks_a_snapshot(
    root: Path, tree: Path, store: ContentStore, code: Bundle
) -> None:
    """A writer that was told that a content is there must find it when it builds its tree."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def collecting() -> None:
        while not stop.is_set():
            try:
                for path in (store.root / "trees").glob("*.json"):
                    os.utime(path, (0, 0))
                ask(root)
            except FileNotFoundError:  # the snapshot whose time we wanted to change was collected
                continue
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=collecting)
    thread.start()
    try:
        for number in range(15):
            (tree / "train.py").write_text(f"print({number})\n")
            store.snapshot(tree)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    last = store.snapshot(tree).digest
    assert store.verify(last) == []
    for path in (store.root / "trees").glob("*.json"):
        assert store.verify(path.stem) == []


# --- environments and working copies ----------------------------------------------------------------------------------


def environment(root: Path, days: float) -> Path:
    envs = root / "envs"
    (envs / ENVIRONMENT / "bin").mkdir(parents=True)
    (envs / ENVIRONMENT / "bin/python").write_bytes(bytes(1000))
    marker = envs / f"{ENVIRONMENT}.json"
    marker.write_text("{}")
    os.utime(marker, (time.time() - days * DAY,) * 2)
    return envs / ENVIRONMENT


def test_an_environment_that_was_not_used_for_long_is_removed(root: Path) -> None:
    directory = environment(root, 30)
    assert ask(root, dry_run=True).environments == [ENVIRONMENT]
    assert directory.exists()
    found = ask(root)
    assert (found.environments, found.size) == ([ENVIRONMENT], 1000)
    assert not directory.exists()
    assert not directory.with_name(f"{ENVIRONMENT}.json").exists()


def test_an_environment_in_use_is_kept(root: Path, store: ContentStore, code: Bundle) -> None:
    directory = environment(root, 30)
    attempt(root, "digits-k3f9a2", code, mentions=str(directory))
    assert ask(root).environments == []
    assert directory.exists()


def test_an_environment_that_is_being_prepared_is_kept(root: Path) -> None:
    import fcntl

    directory = environment(root, 30)
    with directory.with_name(f"{ENVIRONMENT}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ask(root).environments == []
    assert ask(root).environments == [ENVIRONMENT]


@pytest.mark.parametrize(("work", "gone"), [(False, False), (True, True)])
def test_working_copies_of_ended_jobs_go_only_when_asked_for(root: Path, code: Bundle, work: bool, gone: bool) -> None:
    for job, ended in (("ended-k3f9a2", 8), ("running-k3f9a2", None)):
        copy = attempt(root, job, code, ended_days_ago=ended).parent / "work"
        copy.mkdir()
        (copy / "train.py").write_bytes(bytes(500))
        (copy.parent / "checkpoints").mkdir()
        os.utime(copy, (0, 0))
    found = ask(root, work=work)
    assert found.work == (["ended-k3f9a2"] if work else [])
    assert found.size == (500 if work else 0)
    assert (root / "jobs/ended-k3f9a2/work").exists() != gone
    assert (root / "jobs/ended-k3f9a2/checkpoints").exists()
    assert (root / "jobs/running-k3f9a2/work/train.py").exists()
