"""Program where a job has run that lists what it has left as one of its outputs: every file with its digest.

Travels to the hosts as it is: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.hashing import hash_file
from orc.launchers.snapshot.manifest import EXECUTABLE, FILE, Bundle, Entry


def listing(path: str) -> Bundle:
    """Return the manifest of the file or directory *path*; its own name is the first part of all paths.

    Raises `BundleError` for what is not there, empty, or neither file, directory nor link within it.
    """
    try:
        entries = list(_entries(os.fsencode(path), os.path.basename(path)))
    except FileNotFoundError:
        raise BundleError("the job has not left it", where=path) from None
    except OSError as error:
        raise BundleError(
            f"the output cannot be read: {error.strerror or error}", where=error.filename or path
        ) from None
    if not entries:
        raise BundleError("the job has left an empty directory", where=path)
    return Bundle.of(entries)


def _entries(path: bytes, name: str) -> Iterator[Entry]:
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        for inner in sorted(os.listdir(path)):
            yield from _entries(os.path.join(path, inner), f"{name}/{os.fsdecode(inner)}")
    elif stat.S_ISLNK(status.st_mode):
        yield Entry.link(name, os.fsdecode(os.readlink(path)))
    elif stat.S_ISREG(status.st_mode):
        digest, seen = hash_file(path)
        yield Entry(name, EXECUTABLE if seen.st_mode & stat.S_IXUSR else FILE, digest, seen.st_size)
    else:
        raise BundleError("the output is neither a file nor a directory", where=os.fsdecode(path))


def main() -> None:
    """Read a path from standard input; print its manifest, or the error."""
    path = json.load(sys.stdin)["path"]
    try:
        answer = {"manifest": listing(path).to_dict()}
    except BundleError as error:
        answer = {"error": {"what": error.what, "where": error.where}}
    sys.stdout.write(json.dumps(answer))
