"""Ignore files in gitignore syntax, at any depth of a tree, the deepest and the last line deciding as in git."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import BundleError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


def pattern_of(path: str) -> str:
    """Return the pattern that *path*, relative to the root and as it is, matches."""
    return "/" + "".join(f"\\{character}" if character in "\\*?[]! " else character for character in path)


def patterns_of(directory: Path, root: Path) -> tuple[str, ...]:
    """Return the pattern of *directory*; none unless it lies below *root*."""
    found, top = directory.resolve(), root.resolve()
    return (pattern_of(found.relative_to(top).as_posix()),) if top in found.parents else ()


class IgnoreRules:
    """The rules of all files called *filename* below *root*, and of *patterns*, which win over them.

    Paths are relative to *root*, POSIX, decoded as UTF-8 with surrogate escapes. What lies below an ignored directory
    is ignored and cannot be brought back, as in git.
    """

    def __init__(self, root: bytes, filename: str, patterns: Sequence[str] = (), *, where: str = "") -> None:
        self._root = root
        self._filename = filename
        self._patterns = _compile(list(patterns), where) if patterns else None
        self._specs: dict[str, GitIgnoreSpec | None] = {}
        self._directories: dict[str, bool] = {"": False}

    def ignores(self, path: str, *, directory: bool = False) -> bool:
        """Return whether *path* or a directory above it is ignored. Raises `BundleError` for an invalid line."""
        if directory:
            known = self._directories.get(path)
            if known is None:
                known = self._directories[path] = self._decide(path, path + "/")
            return known
        return self._decide(path, path)

    def _decide(self, path: str, text: str) -> bool:
        parent = path.rpartition("/")[0]
        if self.ignores(parent, directory=True):
            return True
        if self._patterns is not None:
            verdict = self._patterns.check_file(text).include
            if verdict is not None:
                return verdict
        while True:
            spec = self._spec(parent)
            if spec is not None:
                verdict = spec.check_file(text[len(parent) + 1 :] if parent else text).include
                if verdict is not None:
                    return verdict
            if not parent:
                return False
            parent = parent.rpartition("/")[0]

    def _spec(self, directory: str) -> GitIgnoreSpec | None:
        if directory not in self._specs:
            path = f"{directory}/{self._filename}" if directory else self._filename
            self._specs[directory] = self._read(path)
        return self._specs[directory]

    def _read(self, path: str) -> GitIgnoreSpec | None:
        full = os.path.join(self._root, path.encode("utf-8", "surrogateescape"))
        try:
            with open(full, "rb") as file:
                text = file.read().decode("utf-8-sig", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise BundleError(f"cannot read the ignore file: {error.strerror}", where=os.fsdecode(full)) from None
        return _compile([line.removesuffix("\r") for line in text.split("\n")], os.fsdecode(full))


def _compile(lines: Sequence[str], where: str) -> GitIgnoreSpec | None:
    """Return one spec of *lines*, `None` when there is no pattern among them. Raises `BundleError` with the line."""
    if not any(line.strip() and not line.startswith("#") for line in lines):
        return None
    from pathspec import GitIgnoreSpec

    invalid = (ValueError, re.error)
    try:
        return GitIgnoreSpec.from_lines(lines)
    except invalid:
        for number, line in enumerate(lines, 1):
            try:
                GitIgnoreSpec.from_lines([line])
            except invalid:
                place = f"{where}:{number}" if where else ""
                raise BundleError(
                    f"not an ignore pattern: {line!r}", where=place, hint="Patterns use the syntax of .gitignore."
                ) from None
        raise
