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
    import shutil
    import stat

    temporary = f"{work}.{os.uname().nodename}.{os.getpid()}.tmp"
    try:
        shutil.copytree(tree, temporary, symlinks=True)
        for directory, _, names in os.walk(temporary):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                mode = os.lstat(path).st_mode
                if not stat.S_ISLNK(mode):  # the snapshot is read-only, the working copy is not
                    os.chmod(path, stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o600))
        try:
            os.rename(temporary, work)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            shutil.rmtree(temporary)  # somebody else was faster, with the same content
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
