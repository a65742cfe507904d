"""Draft of a job and its clusters while a configuration is converted, with notes about what has no equivalent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orc.launchers.accelerate.config_file import AccelerateConfig
from orc.launchers.spec.problems import dotted


@dataclass(frozen=True)
class Note:
    """Key of a file, its place, and what becomes of it."""

    key: str
    where: str
    text: str


class Notes:
    """Notes of one conversion, and the options that are accounted for."""

    def __init__(self, config: AccelerateConfig) -> None:
        self._config = config
        self._settled: set[str] = set()
        self._notes: dict[str, list[Note]] = {}

    def settle(self, name: str) -> None:
        """Account for the option *name*."""
        self._settled.add(name)

    def add(self, name: str, text: str) -> None:
        """Note *text* about the option *name*, and account for it."""
        self.settle(name)
        given = self._config.given.get(name)
        key = dotted(given.path) if given else name
        self._notes.setdefault(name, []).append(Note(key, self._config.where(name), text))

    def settle_rest(self) -> None:
        """Note the reason of the table for every option with a value that nothing has accounted for."""
        for name, given in self._config.given.items():
            if name not in self._settled and not given.option.says_nothing(given.value):
                text = given.option.does
                self.add(name, text[:1].lower() + text[1:].rstrip("."))

    def all(self) -> tuple[Note, ...]:
        """Return the notes in the order of the file, those about what it leaves out last."""
        order = {name: number for number, name in enumerate(self._config.given)}
        names = sorted(self._notes, key=lambda name: order.get(name, len(order)))
        return tuple(note for name in names for note in self._notes[name])


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
