"""Manifest of a tree: entries, their canonical order and digest, and the checks that it must pass; the trees of a job.

Pure: no file system. A manifest may come from another machine, so nothing in it is trusted before `Bundle.of` or
`Bundle.from_dict` has seen it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from orc.launchers.errors import BundleError
from orc.runtime.core.names import safe_relative_name

FORMAT = 1
FILE, EXECUTABLE, SYMLINK = 0o644, 0o755, 0o120000  # git's three modes, without the file-type bits of plain files
_MODES = {f"{mode:04o}": mode for mode in (FILE, EXECUTABLE, SYMLINK)}
SHA256 = re.compile(r"[0-9a-f]{64}")
_SYMLINK_HOPS = 40  # where Linux gives up with ELOOP


class Entry(NamedTuple):
    """File or symbolic link of a snapshot."""

    path: str  # relative, POSIX, UTF-8
    mode: int  # FILE, EXECUTABLE or SYMLINK
    sha256: str  # of the content; of the target for a symbolic link
    size: int  # bytes of what was hashed
    target: str | None = None  # of a symbolic link

    @classmethod
    def link(cls, path: str, target: str) -> Entry:
        """Return the entry of a symbolic link."""
        data = target.encode()
        return cls(path, SYMLINK, hashlib.sha256(data).hexdigest(), len(data), target)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form; ``target`` only for links."""
        data: dict[str, Any] = {
            "path": self.path,
            "mode": f"{self.mode:04o}",
            "sha256": self.sha256,
            "size": self.size,
        }
        if self.target is not None:
            data["target"] = self.target
        return data


@dataclass(frozen=True)
class Bundle:
    """The manifest of a snapshot. Made by `of`, which sorts and checks the entries and computes the digest.

    The digest depends on paths, modes (executable or not), contents and link targets, and on nothing else.
    """

    entries: tuple[Entry, ...]
    digest: str

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Bundle:
        """Return the bundle of *entries*, in any order. Raises `BundleError` for paths that could leave the tree."""
        ordered = tuple(sorted(entries, key=lambda entry: entry.path))
        _check(ordered)
        lines = (f"{e.mode:o} {e.sha256} {e.size} {e.path}\0" for e in ordered)
        canonical = f"orc-tree {FORMAT}\n" + "".join(lines)
        return cls(ordered, hashlib.sha256(canonical.encode()).hexdigest())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Bundle:
        """Invert `to_dict`. Raises `BundleError` for anything malformed, tampered with or unsafe."""
        try:
            if data["format"] != FORMAT:
                raise BundleError(
                    f"the manifest has format {data['format']!r}, this version of orc reads {FORMAT}",
                    hint="Use the orc version that wrote it, or submit again.",
                )
            entries = [
                Entry(str(e["path"]), _MODES[e["mode"]], str(e["sha256"]), int(e["size"]), e.get("target"))
                for e in data["entries"]
            ]
            claimed = data["digest"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"not a snapshot manifest: {type(error).__name__}: {error}") from None
        bundle = cls.of(entries)
        if bundle.digest != claimed:
            raise BundleError(f"the manifest says {claimed!r} but its entries hash to {bundle.digest!r}")
        return bundle

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form with a stable order."""
        return {"format": FORMAT, "digest": self.digest, "entries": [entry.to_dict() for entry in self.entries]}

    @cached_property
    def size(self) -> int:
        """Bytes of all contents."""
        return sum(entry.size for entry in self.entries)

    @cached_property
    def by_path(self) -> Mapping[str, Entry]:
        """Entries by their path."""
        return {entry.path: entry for entry in self.entries}

    def __contains__(self, path: object) -> bool:
        return path in self.by_path


def _check(entries: tuple[Entry, ...]) -> None:
    """Raise `BundleError` for an entry that is malformed or that would be written outside the tree."""
    seen: set[str] = set()
    for entry in entries:
        path = entry.path
        if path in seen:
            raise BundleError("the same path appears twice in a snapshot", where=path)
        seen.add(path)
        try:
            safe_relative_name(path)
        except ValueError:
            raise BundleError(
                "not a relative path inside the tree, of printable characters",
                where=repr(path),
                hint="Rename the file, or exclude it in .orcignore or workdir.exclude.",
            ) from None
        if (
            not SHA256.fullmatch(entry.sha256)
            or entry.size < 0
            or (entry.mode == SYMLINK) != (entry.target is not None)
        ):
            raise BundleError("malformed manifest entry", where=path)
        if entry.target is not None and entry != Entry.link(path, entry.target):
            raise BundleError("the link target does not match its hash", where=path)
    for path in seen:
        parent = path
        while "/" in parent:
            parent = parent.rpartition("/")[0]
            if parent in seen:
                raise BundleError(f"the file lies below {parent!r}, which is not a directory", where=path)
    links = {entry.path: entry.target for entry in entries if entry.target is not None}
    for path, target in links.items():
        if follow(path, links) is None:
            raise BundleError(f"the symbolic link points outside the tree, to {target!r}", where=path)


def follow(path: str, links: Mapping[str, str]) -> str | None:
    """Return the path that *path* leads to inside a tree with these symbolic *links*; `None` when it leaves the tree.

    Links are followed the way the kernel does, component by component, because a target that stays inside when read
    as text can leave the tree through another link. A loop stays inside: it leads to itself.
    """
    pending = path.split("/")[::-1]
    here: list[str] = []
    hops = 0
    while pending:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not here:
                return None
            here.pop()
            continue
        here.append(part)
        target = links.get("/".join(here))
        if target is not None:
            if target.startswith("/"):
                return None
            hops += 1
            if hops > _SYMLINK_HOPS:
                return path
            here.pop()
            pending.extend(target.split("/")[::-1])
    return "/".join(here)


INPUT = "input:"  # begins the keys of artefacts in `Snapshot.digests`


@dataclass(frozen=True)
class Snapshot:
    """Trees that a job runs from: its code, and the runtime and agent that travel with it."""

    code: Bundle
    runtime: Bundle
    environment: Bundle | None = None  # what `environment: copy` or a conda-pack archive brings along
    inputs: Mapping[str, Bundle] = field(default_factory=dict)  # artefacts of other jobs, by the name of the input

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Bundles that have to be on the cluster before the job can start."""
        return (self.code, self.runtime, *((self.environment,) if self.environment else ()), *self.inputs.values())

    @property
    def digests(self) -> dict[str, str]:
        """``{"code": ..., "runtime": ...}`` as recorded in plans and the ledger."""
        found = {"code": self.code.digest, "runtime": self.runtime.digest}
        if self.environment:
            found["environment"] = self.environment.digest
        return found | {f"{INPUT}{name}": bundle.digest for name, bundle in self.inputs.items()}
