"""Files of an attempt that must not outlive it: the agents remove them, and the observer of the end does once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport

NAMES = ("secrets.json", "link.json")
_PER_CALL = 500
_TIMEOUT_S = 60.0


def remove_confidential(transport: Transport, directories: Sequence[str]) -> None:
    """Remove them from attempts that have ended, which agents that were killed have not done. Raises `LaunchError`.

    One call for many. What a file system refuses stays: that the attempt has ended must be told all the same.
    """
    for start in range(0, len(directories), _PER_CALL):
        paths = [f"{directory}/{name}" for directory in directories[start : start + _PER_CALL] for name in NAMES]
        transport.run(["rm", "-f", "--", *paths], timeout_s=_TIMEOUT_S)
