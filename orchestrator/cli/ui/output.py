"""Text on the terminal: colours only where they help, tables that line up, times and sizes for people.

Everything that `orc` prints passes `echo` or one of its neighbours here, which let no control character of a log, a
name or an error through (a test sees to it that nothing else prints).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from orc.launchers.control_characters import escape_controls, escape_controls_in_json

# A style travels in a text as this mark, which nobody else knows, and becomes an escape sequence when it is printed:
# so what a log or a name brings along is told apart from what orc itself has coloured.
_MARK = f"<{os.urandom(8).hex()}"
_MARKS = re.compile(rf"{_MARK}([\d;]*)m")

_STATE_COLOURS = {
    "SUCCEEDED": "green",
    "RUNNING": "cyan",
    "FAILED": "red",
    "LOST": "red",
    "AMBIGUOUS": "yellow",
    "CANCELLED": "yellow",
    "PREEMPTED": "yellow",
}


def coloured(err: bool = False) -> bool:
    """Return True for a stream that wants colours: a terminal that is not dumb, and no NO_COLOR."""
    stream = sys.stderr if err else sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, *, err: bool = False, **styles: Any) -> str:
    """*text* marked with click's styles where the stream wants colours, unchanged elsewhere; for `echo` alone."""
    if not coloured(err):
        return text
    before, after = click.style("\0", **styles).replace("\x1b[", _MARK).split("\0")
    return before + text + after


def rendered(text: str) -> str:
    """*text* as a terminal may have it: control characters escaped, styles as escape sequences."""
    return _MARKS.sub(lambda match: f"\x1b[{match[1]}m", escape_controls(text))


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print *text* as `rendered` on stdout, or on stderr."""
    click.echo(rendered(text), err=err, nl=nl)


def state(name: str, *, width: int = 0) -> str:
    """Return a state's name, coloured by what it means, padded to *width* characters."""
    return style(name.ljust(width), fg=_STATE_COLOURS.get(name), bold=name in ("FAILED", "LOST") or None)


def echo_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    click.echo(escape_controls_in_json(json.dumps(value, indent=2, ensure_ascii=False, default=str)))


def echo_json_line(value: Any) -> None:
    """Print one JSON document on one line, for streams of them."""
    click.echo(escape_controls_in_json(json.dumps(value, ensure_ascii=False, default=str)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart; widths ignore styles. A cell that has several lines stays in its row."""
    cells = [[escape_controls(cell).replace("\n", "\\n") for cell in row] for row in (header, *rows)]
    widths = [max(_width(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for number, row in enumerate(cells):
        padded = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
        line = "  ".join(padded).rstrip()
        lines.append(style(line, bold=True) if number == 0 else line)
    return "\n".join(lines)


def _width(cell: str) -> int:
    return len(_MARKS.sub("", cell))


def clock(at: float | None) -> str:
    """Local date and time of seconds since the epoch, ``-`` when unknown."""
    return "-" if at is None else datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def duration(length: float | None) -> str:
    """``8.2s``, ``3m05s``, ``2h07m``, ``3d04h``; ``-`` when unknown."""
    if length is None:
        return "-"
    length = max(0.0, length)
    if length < 59.95:
        return f"{length:.1f}s" if length < 10 else f"{length:.0f}s"
    minutes, rest = divmod(round(length), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def size(count: float) -> str:
    """Bytes for people: ``512 B``, ``3.4 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
