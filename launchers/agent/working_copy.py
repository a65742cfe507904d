"""The working copy of the job's snapshot."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


def make_work(tree: str, work: str) -> None:
    """Make the job's working copy of its snapshot, all at once under its final name. Kept if it is there."""
    if os.path.isdir(work):
        return
    temporary = f"{work}.{os.uname().nodename}.{os.getpid()}.tmp"
    try:
        _copy(tree, temporary)
        try:
            os.rename(temporary, work)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            _remove(temporary)  # somebody else was faster, with the same content
    except BaseException:
        _remove(temporary)
        raise


def _copy(source: str, target: str) -> None:
    """Copy a directory; the snapshot is read-only, the copy is not.

    `shutil` takes longer to import than most copies do.
    """
    os.mkdir(target, 0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            path = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            elif entry.is_dir():
                _copy(entry.path, path)
            else:
                with open(entry.path, "rb") as reader, open(path, "xb") as writer:
                    while data := reader.read(1 << 20):
                        writer.write(data)
                _keep(entry.path, path, 0o600)
    _keep(source, target, 0o700)


def _keep(source: str, target: str, more: int) -> None:
    """Give *target* the times and the mode of *source*, and *more* permissions."""
    status = os.stat(source)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.chmod(target, status.st_mode & 0o7777 | more)


def _remove(directory: str) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
