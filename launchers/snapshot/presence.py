"""Presence of snapshots in a store: the most frequent question, in as few steps and imports as it takes.

Travels to the hosts as it is: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
from functools import partial

from orc.launchers.strict_modes import VARIABLE, Untrusted, check_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TOUCH_S = 600.0  # how exactly the time of a snapshot's last use is kept
# A file system without locks (NFS without lockd, some FUSE ones): the grace period has to do.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def has(store: str, digest: str) -> bool:
    """Return whether the snapshot is in *store*, complete."""
    tree = os.path.join(store, "trees", digest)
    return os.path.isfile(f"{tree}.json") and os.path.isdir(tree)


def use(store: str, digest: str, *, wait: bool = True) -> bool:
    """Return `has`, and keep a snapshot that is there from being collected for a while. Raises `OSError`.

    Without *wait*, false when it cannot be kept at once, because a collection runs.
    """
    if not has(store, digest):
        return False
    try:
        fd = open_lock(store)
        try:
            if locked(fd, fcntl.LOCK_SH if wait else fcntl.LOCK_SH | fcntl.LOCK_NB) is False:
                return False
            if not has(store, digest):  # collected while we waited
                return False
            manifest = os.path.join(store, "trees", f"{digest}.json")
            if time.time() - os.stat(manifest).st_mtime > _TOUCH_S:
                os.utime(manifest)
        finally:
            os.close(fd)
    except PermissionError:  # another user's store, or a read-only one: we do not collect there
        return True
    return True


def open_lock(store: str) -> int:
    """Return a descriptor of the file whose lock writers share."""
    return os.open(os.path.join(store, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def locked(fd: int, operation: int) -> bool | None:
    """Take a lock; false when another holds it, `None` when there are no locks here."""
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the snapshots in the store below a cluster root, and whether it is free of remains of killed writers."""
    os.environ[VARIABLE] = request.get("trusted", "")
    # The receiver waits for a collection, and says so meanwhile.
    present = has if request.get("dry_run") else partial(use, wait=False)
    root = os.path.expanduser(request["root"])
    try:
        check_root(root)
    except Untrusted:
        return {"have": [], "clean": False}  # the receiver reports why
    store = os.path.join(root, "store")
    try:
        os.listdir(os.path.join(store, "trees"))  # a file system shared by hosts may remember that a name was not there
        left = os.listdir(os.path.join(store, "tmp"))
    except FileNotFoundError:
        return {"have": [], "clean": False}
    return {"have": [digest for digest in request["digests"] if present(store, digest)], "clean": not left}


def main() -> None:
    """Answer one question from standard input."""
    print(json.dumps(answer(json.load(sys.stdin))))
