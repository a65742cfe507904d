"""An output of a job arrives whole and verified, from this machine and from others, or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from orc.launchers.errors import BundleError
from orc.launchers.remote.transport import LocalTransport
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.transfer import fetch


class Elsewhere(LocalTransport):
    """Another machine, as far as transfers know: files come through programs there."""


HERE_AND_ELSEWHERE = pytest.mark.parametrize("transport", [LocalTransport(), Elsewhere()], ids=["here", "elsewhere"])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    place = tmp_path / "work" / "ckpt"
    (place / "step-2").mkdir(parents=True)
    (place / "step-2" / "model.pt").write_bytes(os.urandom(300_000))
    (place / "run me.sh").write_text("#!/bin/sh\n")
    (place / "run me.sh").chmod(0o755)
    (place / "-name").write_text("a dash")
    (place / "latest").symlink_to("step-2")
    return place


def collect(path: Path, transport: LocalTransport, store: Path):
    return fetch.collect(str(path), transport, sys.executable, ContentStore(store))


@HERE_AND_ELSEWHERE
def test_a_directory_arrives_as_it_is(output: Path, tmp_path: Path, transport: LocalTransport) -> None:
    store = ContentStore(tmp_path / "store")
    bundle = collect(output, transport, tmp_path / "store")
    there = Path(store.tree_path(bundle.digest)) / "ckpt"
    assert (there / "step-2/model.pt").read_bytes() == (output / "step-2/model.pt").read_bytes()
    assert os.access(there / "run me.sh", os.X_OK)
    assert (there / "-name").read_text() == "a dash"
    assert os.readlink(there / "latest") == "step-2"
    assert store.verify(bundle.digest) == []
    assert collect(output, transport, tmp_path / "store") == bundle


@HERE_AND_ELSEWHERE
def test_a_file_arrives_under_its_name(output: Path, tmp_path: Path, transport: LocalTransport) -> None:
    bundle = collect(output / "step-2" / "model.pt", transport, tmp_path / "store")
    assert [entry.path for entry in bundle.entries] == ["model.pt"]


@HERE_AND_ELSEWHERE
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "has not left it"),
        ("empty", "empty directory"),
        ("out", "points outside"),
        ("pipe", "neither a file"),
    ],
)
def test_what_cannot_be_passed_on_is_said(
    output: Path, tmp_path: Path, transport: LocalTransport, name: str, said: str
) -> None:
    (output / "empty").mkdir()
    (output / "out").mkdir()
    (output / "out" / "link").symlink_to("../../../secret")
    os.mkfifo(output / "pipe")
    with pytest.raises(BundleError, match=said):
        collect(output / name, transport, tmp_path / "store")


def test_a_file_that_changes_on_the_way_is_not_stored(output: Path, tmp_path: Path, monkeypatch) -> None:
    fetched = fetch.fetch

    def change_first(*given: object) -> None:
        (output / "-name").write_text("a lash")
        fetched(*given)

    monkeypatch.setattr(fetch, "fetch", change_first)
    with pytest.raises(BundleError, match="changed while it was collected"):
        collect(output, Elsewhere(), tmp_path / "store")
    assert not list((tmp_path / "store" / "trees").glob("*"))
