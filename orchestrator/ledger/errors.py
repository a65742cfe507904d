"""Errors of the ledger."""

from __future__ import annotations

from orc.launchers.errors import LaunchError


class LedgerError(LaunchError):
    """The ledger cannot be used: unreadable, not writable, damaged or of another version. Nothing was changed."""


class Conflict(Exception):
    """The job was changed since it was read. Read it again; never shown to users."""
