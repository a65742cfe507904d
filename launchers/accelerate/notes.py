"""Notes about keys of a configuration file that a job file has no equivalent for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orc.launchers.spec.problems import dotted

if TYPE_CHECKING:
    from orc.launchers.accelerate.config_file import AccelerateConfig


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
