"""The content-addressed store: what goes in comes back, damage is noticed, and failures leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.errors import BundleError
from orc.launchers.snapshot import content_store as store_module
from orc.launchers.snapshot import hashing
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.snapshot.scan import SourceTree, scan


@pytest.fixture
def tree(small_tree: Path) -> Path:
    return small_tree


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "state/store")


def visible(store: ContentStore) -> list[str]:
    """What a reader could find, and what a writer left behind."""
    return sorted(
        f"{place}/{name}"
        for place in ("cas", "trees", "tmp")
        if (store.root / place).is_dir()
        for name in os.listdir(store.root / place)
    )


def test_a_stored_tree_is_the_tree(tree: Path, store: ContentStore) -> None:
    bundle = store.snapshot(tree).bundle
    home = store.tree_path(bundle.digest)
    assert scan(home).bundle == bundle
    assert store.load(bundle.digest) == bundle
    assert (home / "pkg/größe.py").read_text() == "x = 1\n"
    assert os.readlink(home / "latest") == "pkg/deep"
    assert os.access(home / "run.sh", os.X_OK)
    assert store.verify(bundle.digest) == []


def test_an_empty_tree_can_be_stored(tmp_path: Path, store: ContentStore) -> None:
    (tmp_path / "empty").mkdir()
    digest = store.snapshot(tmp_path / "empty").digest
    assert store.has(digest)
    assert os.listdir(store.tree_path(digest)) == []


def test_the_store_is_private_and_its_files_are_read_only(
    tree: Path, store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "RACY_NS", 0)  # so that the cache of hashes is written too
    digest = store.snapshot(tree).digest
    for directory in (store.root.parent, store.root, *(store.root / n for n in ("cas", "trees", "tmp", "scan-cache"))):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    for name in os.listdir(store.root / "cas"):
        assert stat.S_IMODE((store.root / "cas" / name).stat().st_mode) == 0o400
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in store.tree_path(digest).rglob("*") if p.is_file()}
    assert modes == {"train.py": 0o400, "__init__.py": 0o400, "größe.py": 0o400, "run.sh": 0o500}


def test_equal_contents_are_stored_once(tree: Path, store: ContentStore) -> None:
    digest = store.snapshot(tree).digest
    (tree / "train.py").write_text("print('other')\n")
    other = store.snapshot(tree).digest
    assert len(os.listdir(store.root / "cas")) == 4  # two of train.py, the empty file, "x = 1"
    first, second = (store.tree_path(d) / "pkg/größe.py" for d in (digest, other))
    assert first.stat().st_ino == second.stat().st_ino


def test_storing_again_writes_nothing(tree: Path, store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.snapshot(tree)
    before = {p: p.lstat().st_mtime_ns for p in store.root.rglob("*") if "scan-cache" not in str(p)}
    monkeypatch.setattr(store_module, "_copy_verified", None)
    store.snapshot(tree)
    assert {p: p.lstat().st_mtime_ns for p in store.root.rglob("*") if "scan-cache" not in str(p)} == before


def test_an_installed_runtime_can_be_stored_and_imported_from_its_tree(store: ContentStore) -> None:
    bundle = store.ingest(runtime_bundle())
    code = "import orc.runtime.core.config as c; print(c.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(store.tree_path(bundle.digest))},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(store.tree_path(bundle.digest) / "orc/runtime/core/config.py"), done.stderr
    # Python has left byte code beside the sources by now; that is no damage.
    assert list(store.tree_path(bundle.digest).rglob("*.pyc"))
    assert store.verify(bundle.digest) == []


def test_orc_s_own_state_inside_the_working_tree_is_left_out(tree: Path) -> None:
    store = ContentStore(tree / ".orc-state/store")
    first = store.snapshot(tree)
    (tree / ".orc-state/ledger.db").write_text("changes all the time")
    assert store.snapshot(tree).digest == first.digest
    assert not [p for p in first.bundle.by_path if p.startswith(".orc-state")]


@pytest.mark.parametrize("root", [".", ".."])
def test_a_store_at_or_above_the_working_tree_hides_none_of_it(tree: Path, root: str) -> None:
    store = ContentStore(tree / root / "store")
    expected = scan(tree).digest
    assert store.snapshot(tree).digest == expected
    assert store.snapshot(tree).digest == expected


def test_a_snapshot_can_be_copied_to_another_store(tree: Path, store: ContentStore, tmp_path: Path) -> None:
    other = ContentStore(tmp_path / "cluster/store")
    digest = store.snapshot(tree).digest
    shutil.rmtree(tree)
    assert store.copy_to(other, digest) == other.load(digest)
    assert other.verify(digest) == []


def test_a_damaged_snapshot_is_not_copied(tree: Path, store: ContentStore, tmp_path: Path) -> None:
    other = ContentStore(tmp_path / "cluster/store")
    digest = store.snapshot(tree).digest
    path = store.tree_path(digest) / "train.py"
    path.chmod(0o600)
    path.write_text("print('evil!')\n")
    with pytest.raises(BundleError, match="changed"):
        store.copy_to(other, digest)
    assert visible(other) == []


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EMLINK, errno.EPERM])
def test_where_hard_links_are_impossible_files_are_copied(
    tree: Path, store: ContentStore, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(store_module.os, "link", refuse)
    digest = store.snapshot(tree).digest
    assert store.verify(digest) == []
    assert (store.tree_path(digest) / "train.py").stat().st_nlink == 1


def test_many_files_are_stored_with_progress(tmp_path: Path, store: ContentStore) -> None:
    (tmp_path / "tree").mkdir()
    for number in range(300):
        (tmp_path / f"tree/{number}.txt").write_text(f"{number:04d}")
    seen: list[tuple[int, int]] = []
    digest = store.snapshot(tmp_path / "tree", on_progress=lambda done, total: seen.append((done, total))).digest
    assert store.verify(digest) == []
    assert seen == [(4 * n, 1200) for n in range(1, 301)]


# --- damage -----------------------------------------------------------------------------------------------------------


def damage(path: Path, kind: str) -> None:
    path.chmod(0o600)
    if kind == "content":
        path.write_text("print('evil!')\n")
    elif kind == "mode":
        path.chmod(0o700)
    elif kind == "missing":
        path.unlink()
    elif kind == "link":
        path.unlink()
        path.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("kind", "what"),
    [("content", "was changed"), ("mode", "another mode"), ("missing", "is missing"), ("link", "not a file any more")],
)
def test_verify_names_what_was_damaged(tree: Path, store: ContentStore, kind: str, what: str) -> None:
    digest = store.snapshot(tree).digest
    damage(store.tree_path(digest) / "train.py", kind)
    (finding,) = store.verify(digest)
    assert finding.level == "error"
    assert "train.py" in finding.what
    assert what in finding.what


def test_verify_reports_strangers_and_changed_links(tree: Path, store: ContentStore) -> None:
    digest = store.snapshot(tree).digest
    home = store.tree_path(digest)
    (home / "pkg/new.py").touch()
    (home / "pkg/way").symlink_to("..")
    (home / "latest").unlink()
    (home / "latest").symlink_to("pkg")
    assert [f.what.split(": ", 1)[1] for f in store.verify(digest)] == [
        "latest: is not the link it was",
        "pkg/new.py: does not belong to the snapshot",
        "pkg/way: does not belong to the snapshot",
    ]


def test_a_content_damaged_through_a_link_is_not_used_again(tree: Path, store: ContentStore) -> None:
    digest = store.snapshot(tree).digest
    damage(store.tree_path(digest) / "train.py", "content")  # same length as before, through the shared inode
    (tree / "run.sh").unlink()
    other = store.snapshot(tree).digest
    assert store.verify(other) == []
    assert len(store.verify(digest)) == 1
    store.remove(digest)
    (tree / "run.sh").write_text("x = 1\n")
    (tree / "run.sh").chmod(0o755)
    assert store.snapshot(tree).digest == digest
    assert store.verify(digest) == []


def test_a_removed_snapshot_is_gone_and_others_stay(tree: Path, store: ContentStore) -> None:
    digest = store.snapshot(tree).digest
    (tree / "train.py").unlink()
    other = store.snapshot(tree).digest
    store.remove(digest)
    store.remove(digest)
    assert not store.has(digest)
    assert store.verify(other) == []
    assert os.listdir(store.root / "tmp") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 7, "digest": "", "entries": []}'])
def test_a_damaged_manifest_is_named(tree: Path, store: ContentStore, text: str) -> None:
    digest = store.snapshot(tree).digest
    (store.root / f"trees/{digest}.json").write_text(text)
    with pytest.raises(BundleError, match="damaged") as caught:
        store.load(digest)
    assert caught.value.where.endswith(f"{digest}.json")


def test_a_manifest_under_another_name_is_refused(tree: Path, store: ContentStore) -> None:
    digest = store.snapshot(tree).digest
    os.rename(store.root / f"trees/{digest}.json", store.root / f"trees/{'0' * 64}.json")
    with pytest.raises(BundleError, match="another snapshot"):
        store.load("0" * 64)
    with pytest.raises(BundleError, match="no snapshot"):
        store.load(digest)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_what_is_no_digest_never_becomes_a_path(store: ContentStore, digest: str) -> None:
    for use in (store.has, store.load, store.tree_path, store.verify, store.remove):
        with pytest.raises(BundleError, match="not a snapshot digest"):
            use(digest)


def test_a_snapshot_is_rebuilt_when_its_tree_was_deleted(tree: Path, store: ContentStore) -> None:
    digest = store.snapshot(tree).digest
    shutil.rmtree(store.tree_path(digest))
    assert not store.has(digest)
    store.snapshot(tree)
    assert store.verify(digest) == []


# --- what cannot be stored --------------------------------------------------------------------------------------------


def test_a_file_that_changed_since_the_scan_is_refused(tree: Path, store: ContentStore) -> None:
    scanned = scan(tree)
    (tree / "train.py").write_text("print('TRAIN')\n")
    with pytest.raises(BundleError, match="changed while the snapshot was taken") as caught:
        store.ingest(scanned)
    assert caught.value.where == str(tree / "train.py")
    assert visible(store) == []


def test_a_file_that_vanished_or_became_a_link_since_the_scan_is_refused(tree: Path, store: ContentStore) -> None:
    scanned = scan(tree)
    (tree / "train.py").unlink()
    with pytest.raises(BundleError, match="cannot read the file any more"):
        store.ingest(scanned)
    (tree / "train.py").symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="cannot read the file any more"):
        store.ingest(scanned)
    assert visible(store) == []


def test_a_change_between_scan_and_copy_makes_for_a_second_scan(
    tree: Path, store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan_then_save(*args: Any, **options: Any) -> SourceTree:
        scanned = scan(*args, **options)
        (tree / "train.py").write_text("print('saved by the editor')\n")
        return scanned

    monkeypatch.setattr(store_module, "scan", scan_then_save)
    digest = store.snapshot(tree).digest
    assert (store.tree_path(digest) / "train.py").read_text() == "print('saved by the editor')\n"


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 256 KiB: a real one where mounting is allowed, otherwise writes that fail like on one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], capture_output=True)
    if mounted.returncode == 0:
        yield disk
        subprocess.run(["umount", "-l", str(disk)], check=True)
        return
    left, real = [256 * 1024], os.write

    def limited(fd: int, data: Any) -> int:
        if len(data) > left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(data)
        return real(fd, data)

    monkeypatch.setattr(store_module.os, "write", limited)
    yield disk


@pytest.mark.parametrize("files", [1, 100])
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tree: Path, small_disk: Path, files: int) -> None:
    for number in range(files):
        (tree / f"weights-{number}.bin").write_bytes(os.urandom(2_000_000 // files))
    store = ContentStore(small_disk / "state/store")
    with pytest.raises(BundleError, match=r"no space for the snapshot of 2\.0 MB") as caught:
        store.snapshot(tree)
    assert caught.value.where == str(store.root)
    assert ".orcignore" in caught.value.hint
    assert visible(store) == []
    # What was not left behind is free again.
    assert store.verify(store.snapshot(tree, ["*.bin"]).digest) == []


def test_a_store_that_is_no_directory_is_named(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(BundleError, match="cannot store the snapshot") as caught:
        ContentStore(tmp_path / "state/store").snapshot(tree)
    assert str(tmp_path / "state") in caught.value.where


def test_an_interrupted_writer_cleans_up(tree: Path, store: ContentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module.os, "link", interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        store.snapshot(tree)
    assert [name for name in visible(store) if not name.startswith("cas/")] == []
