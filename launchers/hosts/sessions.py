"""Sessions on the nodes of running jobs: commands, shells and measurements.

A backend returns the way to a node (`NodeEntry`); `session_probe` runs there, sent as text, so that sessions work with
jobs of earlier versions too.
"""

from __future__ import annotations

import base64
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


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


@cache
def _program() -> str:
    """Return the text of `session_probe` as one short line: it goes through shells of all kinds."""
    packed = base64.b64encode(zlib.compress((Path(__file__).with_name("session_probe.py")).read_bytes(), 9)).decode()
    return f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"


def command(entry: NodeEntry, mode: str, *words: str, terminal: bool = False) -> list[str]:
    """Return the command line for this machine that runs a mode of `session_probe` on one node of an attempt."""
    arguments = (mode, entry.directory, str(entry.node), *words)
    return entry.argv((entry.python, "-I", "-S", "-c", _program(), *arguments), terminal=terminal)


def on_node(entry: NodeEntry, program: Sequence[str], *, rank: int | None = None, terminal: bool = False) -> list[str]:
    """Return the command line that runs *program* in the job's working copy with its or a rank's environment."""
    options = ["--tty"] if terminal else ["--attend"] * entry.through_shell
    options += [f"--rank={rank}"] if rank is not None else []
    return command(entry, "exec", *options, "--", *program, terminal=terminal)
