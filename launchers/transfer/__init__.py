"""Bringing snapshots to the hosts of a cluster, and removing from their stores what no job needs any more."""

from __future__ import annotations

from orc.launchers.transfer.delivery import SyncReport, raise_first, sync

__all__ = ["SyncReport", "raise_first", "sync"]
