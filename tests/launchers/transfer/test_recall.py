"""Snapshots that come back from a host. A directory of this machine stands for the host's root."""

from __future__ import annotations

from pathlib import Path

import pytest

from orc.launchers.errors import BundleError
from orc.launchers.remote.transport import LocalTransport
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.scan import Bundle
from orc.launchers.transfer.fetch import recall


@pytest.fixture
def host(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "host" / "store")


@pytest.fixture
def here(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "here" / "store")


@pytest.fixture
def snapshot(host: ContentStore, tmp_path: Path) -> Bundle:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "train.py").write_text("print('é')\n")
    (tree / "deep" / "same.py").write_text("print('é')\n")
    (tree / "empty").write_text("")
    (tree / "big").write_bytes(bytes(range(256)) * 20_000)
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("deep/same.py")
    return host.snapshot(tree).bundle


def bring(snapshot: Bundle, host: ContentStore, here: ContentStore) -> Bundle:
    return recall(snapshot.digest, LocalTransport(), str(host.root.parent), here)


def test_a_snapshot_comes_back_whole(snapshot: Bundle, host: ContentStore, here: ContentStore) -> None:
    assert bring(snapshot, host, here) == snapshot
    assert here.verify(snapshot.digest) == []
    assert (here.tree_path(snapshot.digest) / "link").read_text() == "print('é')\n"
    assert list((here.root / "tmp").iterdir()) == []
    assert bring(snapshot, host, here) == snapshot


def test_only_what_is_missing_is_fetched(
    snapshot: Bundle, host: ContentStore, here: ContentStore, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "big").write_bytes(bytes(range(256)) * 20_000)
    here.snapshot(other)
    (host.root / "cas" / snapshot.by_path["big"].sha256).unlink()
    bring(snapshot, host, here)
    assert here.verify(snapshot.digest) == []


def test_what_the_host_does_not_have_is_refused(host: ContentStore, here: ContentStore, snapshot: Bundle) -> None:
    with pytest.raises(BundleError, match="no snapshot 0000") as caught:
        recall("0" * 64, LocalTransport(), str(host.root.parent), here)
    assert caught.value.where == "local"


def test_a_host_that_lost_a_content_leaves_nothing_half_made(
    snapshot: Bundle, host: ContentStore, here: ContentStore
) -> None:
    (host.root / "cas" / snapshot.by_path["big"].sha256).unlink()
    with pytest.raises(BundleError, match="1 files of the snapshot are missing"):
        bring(snapshot, host, here)
    assert not here.has(snapshot.digest)


def test_a_content_that_was_changed_on_the_host_is_not_taken(
    snapshot: Bundle, host: ContentStore, here: ContentStore
) -> None:
    spoilt = host.root / "cas" / snapshot.by_path["train.py"].sha256
    spoilt.chmod(0o600)
    spoilt.write_text("print('!')\n")
    with pytest.raises(BundleError, match="is damaged"):
        bring(snapshot, host, here)
    assert not here.has(snapshot.digest)
    assert list((here.root / "tmp").iterdir()) == []
