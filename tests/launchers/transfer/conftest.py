"""Hosts that are directories of this machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.remote.transport import Completed, LocalProcess, LocalTransport
from orc.launchers.snapshot.content_store import ContentStore


class Host(LocalTransport):
    """A directory of this machine that plays a host. *watch* sees what goes to it and what comes from it."""

    def __init__(self, name: str, root: Path, watch: Callable[[str, int], None] = lambda *_: None) -> None:
        self.name = name
        self.root = root
        self.watch = watch
        self.started: list[Sequence[str]] = []

    @property
    def store(self) -> ContentStore:
        return ContentStore(self.root / "store")

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        self.watch("to", len(options.get("stdin") or b""))
        done = super().run(argv, **options)
        self.watch("from", len(done.stdout))
        return done

    def stream(self, argv: Sequence[str], *, timeout_s: float) -> LocalProcess:
        self.started.append(argv)
        host = self

        class Watched(LocalProcess):
            def write(self, data: bytes) -> None:
                for start in range(0, len(data), 1 << 16):
                    piece = data[start : start + (1 << 16)]
                    super().write(piece)
                    host.watch("to", len(piece))

            def read(self, size: int) -> bytes:
                data = super().read(size)
                host.watch("from", len(data))
                return data

        return Watched(argv, timeout_s)


@pytest.fixture
def lab(tmp_path: Path) -> Callable[[int], dict[str, Host]]:
    """Hosts by name."""
    return lambda count: {f"node{n}": Host(f"node{n}", tmp_path / f"hosts/node{n}/orc") for n in range(1, count + 1)}


def targets(hosts: dict[str, Host]) -> dict[str, tuple[Any, str]]:
    return {name: (host, str(host.root)) for name, host in hosts.items()}


def state_of(store: ContentStore) -> dict[str, tuple[object, ...]]:
    """Everything about a store that a reader could notice: kinds, modes, times of contents, bytes, link groups."""
    groups: dict[int, str] = {}
    found = {}
    for path in sorted(p for place in ("cas", "trees", "tmp") for p in (store.root / place).rglob("*")):
        name, status = str(path.relative_to(store.root)), path.lstat()
        if stat.S_ISLNK(status.st_mode):
            found[name] = ("link", os.readlink(path))
        elif stat.S_ISDIR(status.st_mode):
            found[name] = ("directory", stat.S_IMODE(status.st_mode))
        else:
            time = status.st_mtime_ns if path.suffix != ".json" else 0
            group = groups.setdefault(status.st_ino, name)
            found[name] = ("file", stat.S_IMODE(status.st_mode), time, path.read_bytes(), group)
    for place in (".", "cas", "trees", "tmp"):
        found[place] = ("directory", stat.S_IMODE((store.root / place).stat().st_mode))
    return found
