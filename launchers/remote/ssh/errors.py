"""Errors of connections to hosts."""

from __future__ import annotations

from orc.launchers.errors import BackendUnreachable


class HostAccessError(BackendUnreachable):
    """The host answered and one side refused the other: a key, a host key, no Python. Trying again does not help.

    It says nothing about the jobs that run there, hence it is a `BackendUnreachable`.
    """


class LinkLost(BackendUnreachable):
    """The connection was cut or fell silent while something was underway. Whether that had its effect is unknown."""


class NoSession(LinkLost):
    """The connection was found dead before anything was started over it."""
