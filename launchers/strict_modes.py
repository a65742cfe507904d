"""Owners and modes of files: those that another user can change are rejected, like ``StrictModes`` of sshd.

Travels to hosts: standard library only, Python >= 3.9.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "ORC_TRUSTED_PATHS"  # what lies at or below these is believed; separated by colons


class Untrusted(OSError):
    """Others could have written what is at a path. ``strerror`` names them, and the remedy."""


def check(path: str | os.PathLike[str]) -> None:
    """Raise `Untrusted` unless *path*, as far as it is there, and all above it can be changed by its user alone.

    That is whoever runs this, or root. A directory above may be sticky, like ``/tmp``; a group that has no other member
    than its owner does not count.
    """
    full = os.path.abspath(path)
    real = os.path.realpath(full)
    if any(real == one or real.startswith(one.rstrip("/") + "/") for one in _trusted()):
        return
    for place in dict.fromkeys((*_upwards(real), *_upwards(full))):
        try:
            status = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        why = _fault(status, is_above=place not in (real, full))
        if why:
            raise Untrusted(
                errno.EPERM,
                f"{why}; or set {VARIABLE}={real} if everybody who can change it may run programs as you",
                place,
            )


def check_root(root: str) -> None:
    """`check` of a cluster's root and of the directories in it that code and orders are read from."""
    for name in ("store/trees", "store/cas", "jobs"):
        check(os.path.join(root, name))


def _fault(status: os.stat_result, *, is_above: bool) -> str:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to {_user(status.st_uid)}: use a directory or file of your own"
    if stat.S_ISLNK(status.st_mode) or stat.S_ISCHR(status.st_mode) or (is_above and mode & stat.S_ISVTX):
        return ""  # /dev/null is everybody's
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private_group(status)):
        return f"others can write to it (mode {mode:04o}): chmod go-w it"
    return ""


def _is_private_group(status: os.stat_result) -> bool:
    """Return whether the group is the owner's own, which many systems give to each user, with a umask of 002."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return owner.pw_gid == status.st_gid and owner.pw_name == group.gr_name and set(group.gr_mem) <= {owner.pw_name}


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _trusted() -> list[str]:
    given = os.environ.get(VARIABLE, "").split(":")
    return [os.path.realpath(os.path.expanduser(path)) for path in given if path]


def _upwards(path: str) -> Iterator[str]:
    yield path
    while os.path.dirname(path) != path:
        path = os.path.dirname(path)
        yield path


def make_private(directory: str | os.PathLike[str]) -> None:
    """Make *directory* and what is missing above it, for this user only. Raises `OSError`."""
    if not os.path.isdir(directory):
        make_private(os.path.dirname(os.path.abspath(directory)))
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:  # another process, or another host of a shared file system, was faster
            if not os.path.isdir(directory):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory) from None
