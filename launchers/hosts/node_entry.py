"""Command line from this machine to one node of an attempt."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeEntry:
    """Way of a command to one node of an attempt: the words in front of it on this machine."""

    node: int
    host: str
    directory: str  # of the attempt, over there; may begin with ~
    python: str  # an interpreter over there
    prefix: tuple[str, ...] = ()  # empty: the node is this machine
    for_terminal: tuple[str, ...] = ()  # instead of *prefix*, for what wants a terminal
    through_shell: bool = False  # the other side's shell reads the command, so it is quoted

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        """Return the command line for this machine that runs *command* on the node."""
        prefix = self.for_terminal if terminal else self.prefix
        if not self.through_shell:
            return [*prefix, *command]
        program, *words = command
        home = "~/" if program.startswith("~/") else ""  # a program in the home directory over there
        return [*prefix, home + shlex.join([program.removeprefix(home), *words])]
