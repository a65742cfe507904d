"""Draft of a job and its clusters while a configuration is converted, and what every place of a run decides alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orc.launchers.accelerate.config_file import AccelerateConfig
from orc.launchers.accelerate.notes import Notes

# What orc decides for every attempt, and a file of one machine says for nothing.
_DECIDED = {
    "machine_rank": "orc numbers the nodes of each attempt; one job file serves all of them",
    "main_process_port": "node 0 takes a free port for each attempt",
}


@dataclass
class Draft:
    """Job and clusters while they are written."""

    config: AccelerateConfig
    notes: Notes
    job: dict[str, Any]
    runtime: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, Any] = field(default_factory=dict)
    launcher: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of the option *name*, for which this accounts."""
        self.notes.settle(name)
        return self.config.get(name, default)


def cluster_name(title: str, suffix: str) -> str:
    """Return the name of the cluster of the job *title*."""
    return title if suffix in title else f"{title[: 62 - len(suffix)]}-{suffix}"


def decided(draft: Draft) -> None:
    """Account for what orc decides itself; with several machines by a note."""
    for name, why in _DECIDED.items():
        if draft.take(name) is not None and draft.config.get("num_machines", 1) > 1:
            draft.notes.add(name, why)
    draft.notes.settle("same_network")
