"""A working tree with every kind of entry, and a store with a snapshot of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.scan import Bundle


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A working tree: nested directories, equal contents, an empty file, an executable, a link."""
    root = tmp_path / "tree"
    (root / "pkg/deep").mkdir(parents=True)
    (root / "train.py").write_text("print('train')\n")
    (root / "pkg/__init__.py").touch()
    (root / "pkg/deep/__init__.py").touch()
    (root / "pkg/größe.py").write_text("x = 1\n")
    (root / "run.sh").write_text("x = 1\n")
    (root / "run.sh").chmod(0o755)
    (root / "latest").symlink_to("pkg/deep")
    return root


@pytest.fixture
def tree(small_tree: Path) -> Path:
    """A larger one, with odd names."""
    root = small_tree
    (root / "only.sh").write_text("#!/bin/sh\n")
    (root / "only.sh").chmod(0o755)
    (root / "-n a'me").write_text("odd\n")
    (root / "weights.bin").write_bytes(os.urandom(700_000))
    for number in range(100):
        (root / f"pkg/module_{number}.py").write_text(f"value = {number}\n" * 50)
    return root


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "laptop/store")


@pytest.fixture
def code(tree: Path, store: ContentStore) -> Bundle:
    return store.snapshot(tree).bundle


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``nvidia_smi(text, status=0)``: a program of that name in front of PATH prints *text* whatever it is asked."""

    def make(text: str, status: int = 0) -> None:
        place = tmp_path / "nvidia"
        place.mkdir(exist_ok=True)
        (place / "listed").write_text(text)
        (place / "nvidia-smi").write_text(f"#!/bin/sh\ncat '{place}/listed'\nexit {status}\n")
        (place / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
