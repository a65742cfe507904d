"""Sessions on the nodes of running jobs: commands, shells and measurements.

A backend returns the way to a node (`orc.launchers.backends.base.NodeEntry`); `session_probe` runs
there, sent as text, so that sessions work with jobs of earlier versions too.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.hosts.node_entry import NodeEntry


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
