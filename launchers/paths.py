"""Directories of orc on this machine. Every place can be moved with an environment variable."""

from __future__ import annotations

import os
from pathlib import Path

from orc.launchers import strict_modes
from orc.launchers.errors import LaunchError


def state_dir(*, create: bool = True) -> Path:
    """Ledger, snapshots and local attempts: ``$ORC_STATE_DIR``, or the user's state directory.

    Created, with access for the owner only, unless *create* is false. Raises `LaunchError`, also where other users
    could change what is there.
    """
    path = _place("ORC_STATE_DIR", "user_state_dir")
    refuse_untrusted(path, "state directory")
    try:
        if create and not path.is_dir():
            strict_modes.make_private(path)
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, (FileExistsError, NotADirectoryError)) else error.strerror
        raise LaunchError(
            f"the state directory cannot be created: {reason}",
            where=str(path),
            hint="set ORC_STATE_DIR to a directory you can write to",
        ) from None
    return path


def config_dir() -> Path:
    """The user's configuration: ``$ORC_CONFIG_DIR``, or the user's configuration directory. Not created."""
    return _place("ORC_CONFIG_DIR", "user_config_dir")


def clusters_file() -> Path:
    """The clusters file: ``$ORC_CLUSTERS``, or ``clusters.yaml`` in `config_dir`. Need not exist."""
    given = os.environ.get("ORC_CLUSTERS")
    return Path(given).expanduser().absolute() if given else config_dir() / "clusters.yaml"


def refuse_untrusted(path: str | Path, what: str, kind: type[LaunchError] = LaunchError) -> None:
    """Raise an error of that *kind* where others than the user and root could have written what is at *path*."""
    try:
        strict_modes.check(path)
    except strict_modes.Untrusted as error:
        raise kind(
            f"the {what} {path} is not to be trusted", where=str(error.filename), hint=str(error.strerror)
        ) from None


def _place(variable: str, function: str) -> Path:
    given = os.environ.get(variable)
    if given and not given.isprintable():  # paths become lines of scripts and of records
        raise LaunchError(f"{variable} is {given!r}: a path is one line of printable characters")
    if given:
        return Path(given).expanduser().absolute()
    # Imported only when the variable is unset: start-up time.
    import platformdirs

    return Path(getattr(platformdirs, function)("orc"))
