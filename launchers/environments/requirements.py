"""Requirements files: the files that one names, and what of it cannot be in a shared environment.

Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import hashlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class EnvironmentBuildError(Exception):
    """The environment cannot be made here; the message is the reason that people read."""


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file."""
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            hashed.update(chunk)
    return hashed.hexdigest()


def read_requirements(path: str, seen: dict[str, str] | None = None) -> dict[str, str]:
    """The contents of a requirements file and of all files it names, by path. Raises `EnvironmentBuildError`."""
    seen = {} if seen is None else seen
    if path in seen:
        return seen
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentBuildError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    seen[path] = hashlib.sha256(text.encode()).hexdigest()
    here = os.path.dirname(path)
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        words = line.split(" #")[0].split()
        if not words or words[0].startswith("#"):
            continue
        option, _, value = words[0].partition("=")
        value = value or (words[1] if len(words) > 1 else "")
        if option in ("-e", "--editable"):
            raise EnvironmentBuildError(
                f"{path}:{number}: an editable install belongs to one working copy, but this environment is shared by "
                "jobs; the job's own files can be imported without being installed"
            )
        if option in ("-r", "--requirement", "-c", "--constraint"):
            if "://" not in value:
                read_requirements(os.path.normpath(os.path.join(here, value)), seen)
        elif option[:2] in ("-r", "-c") and not option.startswith("--"):
            read_requirements(os.path.normpath(os.path.join(here, words[0][2:])), seen)
    return seen


def local_files(lines: Sequence[str], cwd: str) -> dict[str, str]:
    """Digests of the files that requirement lines name by path. Raises `EnvironmentBuildError` for directories."""
    found = {}
    for line in lines:
        word = line.split(" #")[0].split(";")[0].split(" --")[0].strip()
        path = word.rpartition(" @ ")[2].strip() if " @ " in word else word
        path = path[len("file://") :] if path.startswith("file://") else path
        path = path.split("[")[0].split("#")[0]
        if not path or path.startswith("-") or "://" in path:
            continue
        if not (path.startswith((".", "/")) or path.endswith((".whl", ".tar.gz", ".zip"))):
            continue
        full = os.path.join(cwd, path)
        if os.path.isdir(full):
            raise EnvironmentBuildError(
                f"{line.strip()}: a directory would have to be built in the job's snapshot, which is read-only; name a "
                "wheel of it (pip wheel --no-deps)"
            )
        if os.path.isfile(full):
            found[path] = file_digest(full)
    return found


def lines_of(path: str) -> list[str]:
    """The logical lines of a requirements file."""
    with open(path, encoding="utf-8") as file:
        return file.read().replace("\\\n", " ").splitlines()
