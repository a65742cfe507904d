"""Trees that travel to a cluster for one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.snapshot.manifest import Bundle

INPUT = "input:"  # begins the keys of artefacts in `Snapshot.digests`


@dataclass(frozen=True)
class Snapshot:
    """Trees that a job runs from: its code, and the runtime and agent that travel with it."""

    code: Bundle
    runtime: Bundle
    environment: Bundle | None = None  # what `environment: copy` or a conda-pack archive brings along
    inputs: Mapping[str, Bundle] = field(default_factory=dict)  # artefacts of other jobs, by the name of the input

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Bundles that have to be on the cluster before the job can start."""
        return (self.code, self.runtime, *((self.environment,) if self.environment else ()), *self.inputs.values())

    @property
    def digests(self) -> dict[str, str]:
        """``{"code": ..., "runtime": ...}`` as recorded in plans and the ledger."""
        found = {"code": self.code.digest, "runtime": self.runtime.digest}
        if self.environment:
            found["environment"] = self.environment.digest
        return found | {f"{INPUT}{name}": bundle.digest for name, bundle in self.inputs.items()}
