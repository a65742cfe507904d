"""Bell: notification of the user of this machine that jobs have ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import click

from orc.launchers.control_characters import escape_controls

_PATIENCE_S = 5.0


def ring(title: str, lines: Sequence[str]) -> None:
    """Ring the terminal's bell, and show *title* and *lines* on the desktop where ``notify-send`` can."""
    if sys.stderr.isatty():
        click.echo("\a", err=True, nl=False)
    program = shutil.which("notify-send")
    if program and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        # A body may hold markup; names and reasons hold none of ours.
        body = "\n".join(escape_controls(line) for line in lines).replace("&", "&amp;").replace("<", "&lt;")
        words = [program, "--app-name=orc", "--", escape_controls(title), body]
        try:
            subprocess.run(words, timeout=_PATIENCE_S, check=False, capture_output=True)
        except (OSError, subprocess.TimeoutExpired):
            return  # no desktop answers: the terminal has been told
