"""Room on the ledger's disk: whether anything can be written there, and some space that is kept back for a full one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RESERVE_BYTES = 1 << 20
_ENOUGH_BYTES = 64 << 20  # only then is something kept back
_TRIAL_BYTES = 64 << 10
_NEEDED_BYTES = 256 << 10  # for the changes of one command, and the files that SQLite keeps beside the ledger


def unwritable(path: Path) -> str:
    """Return the reason why the ledger at *path* cannot be written now; empty when it can."""
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return ""  # what is wrong shows when it is opened
    if status.f_flag & os.ST_RDONLY:
        return "its file system is read-only"
    if _free(status) < _NEEDED_BYTES:
        _give_up(path)
        if _free(os.statvfs(path.parent)) < _NEEDED_BYTES:
            return "its disk is full"
    if not path.exists():
        return ""
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return "you may not write it"
    if _try(path):
        _give_up(path)
        return _try(path)
    return ""


def _try(path: Path) -> str:
    """Return the reason why a small file beside *path* cannot be written; quotas and lack of inodes show here."""
    trial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            trial.unlink()
            os.write(descriptor, bytes(_TRIAL_BYTES))
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"nothing can be written beside it: {error.strerror or error}"
    return ""


def keep(path: Path) -> None:
    """Hold some space back beside *path* where there is plenty. Random bytes: no file system can compress them."""
    reserve = _reserve(path)
    with contextlib.suppress(OSError):
        if reserve.exists() or _free(os.statvfs(path.parent)) < _ENOUGH_BYTES:
            return
        descriptor = os.open(reserve, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, os.urandom(RESERVE_BYTES))
        finally:
            os.close(descriptor)


def _give_up(path: Path) -> None:
    with contextlib.suppress(OSError):
        _reserve(path).unlink()


def _reserve(path: Path) -> Path:
    return path.with_name(path.name + ".reserve")


def _free(status: os.statvfs_result) -> int:
    if not status.f_blocks:  # some file systems in user space do not say how large they are
        return _ENOUGH_BYTES
    return (status.f_bfree if os.geteuid() == 0 else status.f_bavail) * status.f_frsize
