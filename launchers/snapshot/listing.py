"""Files that belong to a working tree: those that git sees, or a plain walk by the same rules of what is ignored."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import BundleError
from orc.launchers.findings import Finding

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


# Repository metadata and byte code of this machine's Python are never part of a job, whatever the rules say.
_NEVER = frozenset({".git", "__pycache__"})
_SPECIAL = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
# What git runs, or fetches, because a repository's own configuration says so: a workdir may be another person's work.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_GIT_RESTRAINT = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
_GIT_S = 120.0  # a million files take a few seconds
# A git hook or a wrapper may have pointed git at another repository than the one around the working directory.
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")


def encode(path: str) -> bytes:
    """Return the name on disk of a listed path; independent of the locale."""
    return path.encode("utf-8", "surrogateescape")


def decode(name: bytes) -> str:
    """Invert `encode`."""
    return name.decode("utf-8", "surrogateescape")


class Listing:
    """The files of the working tree below *root*, an absolute path without symbolic links.

    *exclude* are patterns in gitignore syntax on top of all ``.orcignore`` files; *skip* are absolute directories
    that are left out silently (orc's own state) if they lie below *root*. Raises `BundleError`.
    """

    def __init__(self, root: bytes, exclude: Sequence[str] = (), skip: Sequence[bytes] = ()) -> None:
        # Regular files and symbolic links by path (UTF-8 with surrogate escapes), and what was left out unasked.
        self.files: dict[str, os.stat_result] = {}
        self.findings: list[Finding] = []
        self.root = root
        self.skip = tuple(path for path in skip if path.startswith(root.rstrip(b"/") + b"/"))
        self.rules = IgnoreRules(root, ".orcignore", exclude, where="workdir.exclude")
        self.git_rules = IgnoreRules(root, ".gitignore")
        self.real: dict[str, bool] = {"": True}
        names = self._git(self.root) if _inside_repository(self.root) else None
        if names == []:
            # All of it is ignored by a repository further up (a git-managed home directory, a build folder).
            # The user named this directory on purpose, so that repository has no say.
            names = None
        if names is None:
            self._walk("")
        else:
            self._take(names, "")

    def _take(self, names: list[str], prefix: str) -> None:
        """Add the files that git listed for the repository at *prefix*."""
        for name in dict.fromkeys(names):  # unmerged paths are listed once per stage
            path = prefix + name.rstrip("/")
            if self._unwanted(path) or not self._real_directory(path.rpartition("/")[0]):
                continue
            try:
                status = os.lstat(self._full(path))
            except (FileNotFoundError, NotADirectoryError):
                continue  # tracked, but deleted in the working tree
            except OSError as error:
                raise _unreadable(self._full(path), error) from None
            if not stat.S_ISDIR(status.st_mode):
                if not self.rules.ignores(path):
                    self._add(path, status)
            elif not self.rules.ignores(path, directory=True):
                self._nested(path)

    def _nested(self, path: str) -> None:
        """Add a directory of git's list: a submodule, or a repository that happens to lie in the tree."""
        full = self._full(path)
        if os.path.lexists(os.path.join(full, b".git")):
            names = self._git(full)
            if names is None:
                self._walk(path)
            else:
                self._take(names, path + "/")
        elif not os.listdir(full):
            self.findings.append(
                Finding(
                    "warning",
                    "the submodule is not checked out, the snapshot holds nothing of it",
                    where=path,
                    hint="git submodule update --init",
                )
            )

    def _walk(self, top: str) -> None:
        """Add everything below *top* that no ``.gitignore`` and no ``.orcignore`` excludes."""
        pending = [top]
        while pending:
            directory = pending.pop()
            try:
                with os.scandir(self._full(directory)) as entries:
                    found = sorted(entries, key=lambda entry: entry.name)
                for entry in found:
                    name = decode(entry.name)
                    path = f"{directory}/{name}" if directory else name
                    if self._unwanted(path):
                        continue
                    if not entry.is_dir(follow_symlinks=False):
                        if not (self.git_rules.ignores(path) or self.rules.ignores(path)):
                            with contextlib.suppress(FileNotFoundError):  # deleted since the directory was read
                                self._add(path, os.lstat(entry.path))
                    elif not (self.git_rules.ignores(path, directory=True) or self.rules.ignores(path, directory=True)):
                        if os.path.lexists(os.path.join(entry.path, b".git")):
                            self._nested(path)
                        else:
                            pending.append(path)
            except OSError as error:
                raise _unreadable(self._full(directory), error) from None

    def _add(self, path: str, status: os.stat_result) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if kind in (stat.S_IFREG, stat.S_IFLNK):
            self.files[path] = status
        else:
            what = _SPECIAL.get(kind, "special file")
            self.findings.append(Finding("warning", f"left out: it is a {what}, not a file", where=path))

    def _unwanted(self, path: str) -> bool:
        return path.endswith(".pyc") or not _NEVER.isdisjoint(path.split("/")) or self._skipped(path)

    def _skipped(self, path: str) -> bool:
        return any((self._full(path) + b"/").startswith(own + b"/") for own in self.skip)

    def _real_directory(self, path: str) -> bool:
        """Return false when a tracked directory was replaced by a link or a file: git still lists what was below."""
        known = self.real.get(path)
        if known is None:
            known = self._real_directory(path.rpartition("/")[0])
            if known:
                try:
                    known = stat.S_ISDIR(os.lstat(self._full(path)).st_mode)
                except OSError:
                    known = False
            self.real[path] = known
        return known

    def _full(self, path: str) -> bytes:
        return os.path.join(self.root, encode(path)) if path else self.root

    def _git(self, directory: bytes) -> list[str] | None:
        """Return tracked and untracked, not ignored paths below *directory*; `None` without git or a repository."""
        import subprocess

        env = {key: value for key, value in os.environ.items() if key not in _GIT_VARIABLES}
        try:
            done = subprocess.run(
                [*_GIT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                cwd=directory,
                env={**env, **_GIT_RESTRAINT},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=_GIT_S,
            )
        except subprocess.TimeoutExpired:
            raise BundleError(
                f"git has not listed the working tree within {_GIT_S:.0f} s",
                where=decode(directory),
                hint="is a file that git reads (`git config core.excludesFile`) a pipe, or on a disk that hangs?",
            ) from None
        except FileNotFoundError:
            return None  # git is not installed
        except OSError as error:
            raise _unreadable(directory, error) from None
        if done.returncode == 0:
            return [decode(name) for name in done.stdout.split(b"\0") if name]
        stderr = done.stderr.decode("utf-8", "replace").strip()
        if "not a git repository" in stderr:
            return None
        if "dubious ownership" in stderr:
            # git will not obey the configuration of another user's repository. A plain walk obeys nothing.
            top = os.fsdecode(next(d for d in _upwards(directory) if os.path.lexists(os.path.join(d, b".git"))))
            self.findings.append(
                Finding(
                    "warning",
                    "git does not trust this repository, which belongs to another user; its ignore files were obeyed",
                    where=top,
                    hint=f"git config --global --add safe.directory {shlex.quote(top)}",
                )
            )
            return None
        raise BundleError(
            f"git cannot list the working tree: {stderr.splitlines()[0] if stderr else f'status {done.returncode}'}",
            where=decode(directory),
            hint="\n  ".join(line.strip() for line in stderr.splitlines()[1:] if line.strip())
            or "Run `git status` there to see what is wrong.",
        )


def _inside_repository(root: bytes) -> bool:
    """Return whether there is a repository above: asking the file system is a thousand times cheaper than git."""
    return any(os.path.lexists(os.path.join(directory, b".git")) for directory in _upwards(root))


def _upwards(path: bytes) -> Iterator[bytes]:
    yield path
    while (parent := os.path.dirname(path)) != path:
        path = parent
        yield path


def _unreadable(path: bytes, error: OSError) -> BundleError:
    place = error.filename if isinstance(error.filename, bytes) else path
    return BundleError(
        f"cannot read: {error.strerror or error}",
        where=os.fsdecode(place),
        hint="Make it readable, or exclude it in .orcignore or workdir.exclude.",
    )
