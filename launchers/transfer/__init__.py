"""Transfer of snapshots to the hosts of a cluster and back, and collection of garbage in their stores."""

from __future__ import annotations

from orc.launchers.transfer.delivery import SyncReport, raise_first, sync

__all__ = ["SyncReport", "raise_first", "sync"]
