"""Trees that travel to a cluster for one job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.snapshot.manifest import Bundle


@dataclass(frozen=True)
class Snapshot:
    """Trees that a job runs from: its code, and the runtime and agent that travel with it."""

    code: Bundle
    runtime: Bundle
    environment: Bundle | None = None  # what `environment: copy` or a conda-pack archive brings along

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Bundles that have to be on the cluster before the job can start."""
        return (self.code, self.runtime, *((self.environment,) if self.environment else ()))

    @property
    def digests(self) -> dict[str, str]:
        """``{"code": ..., "runtime": ...}`` as recorded in plans and the ledger."""
        found = {"code": self.code.digest, "runtime": self.runtime.digest}
        return {**found, "environment": self.environment.digest} if self.environment else found
