"""The one exception of the launch layer that users see: what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a host, to which this file travels


class LaunchError(Exception):
    """A job could not be understood, rendered, shipped or started.

    Parameters
    ----------
    what:
        One sentence: what went wrong. Never contains the value of a secret.
    where:
        The place: ``job.yaml:3:5``, a host, a job id, a path. Empty when there is none.
    hint:
        What the user can do about it. Empty when nothing useful can be said.

    ``host`` is the host of the cluster that is to blame, by its name there; empty when none is, or nobody knows.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.host = ""

    def of(self, host: str) -> Self:
        """This error, blamed on *host*."""
        self.host = host
        return self

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  {self.hint}" if self.hint else text


class SpecError(LaunchError):
    """The job file, the clusters file or a ``--set`` override is wrong. Nothing was done."""


class RenderError(LaunchError):
    """The job is well-formed but cannot be carried by the chosen command or backend. Nothing was done."""


class BundleError(LaunchError):
    """The working tree could not be read or stored. No half-made snapshot is left behind."""


class BackendError(LaunchError):
    """A backend refused a request for good: the job has not been started.

    A backend that *cannot know* whether the job started raises `AmbiguousSubmit` instead.
    """


class BackendUnreachable(BackendError):
    """The backend did not answer (controller down, link cut, time-out). Never means that a job failed."""


class PartlyUnreachable(BackendUnreachable):
    """Some of several attempts could not be reached; the others have been dealt with.

    ``markers`` are those of the attempts that were not reached.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "", markers: Sequence[str] = ()) -> None:
        super().__init__(what, where=where, hint=hint)
        self.markers = tuple(markers)


class AmbiguousSubmit(BackendError):
    """The submission was cut off: the job may or may not exist. `Backend.find` finds out."""


class NoRoom(BackendError):
    """The hosts that the job needs are taken by others: nothing was started, and it can be once they are free.

    ``holders`` are the markers of the attempts in the way, as far as known.
    """

    def __init__(self, what: str, *, where: str = "", holders: Sequence[str] = ()) -> None:
        super().__init__(what, where=where)
        self.holders = tuple(holders)


class HostAccessError(BackendUnreachable):
    """The host answered and one side refused the other: a key, a host key, no Python. Trying again does not help.

    It says nothing about the jobs that run there, hence it is a `BackendUnreachable`.
    """


class LinkLost(BackendUnreachable):
    """The connection was cut or fell silent while something was underway. Whether that had its effect is unknown."""


class NoSession(LinkLost):
    """The connection was found dead before anything was started over it."""
