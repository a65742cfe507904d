"""Text on the terminal: colours only where they help, tables that line up, times and sizes for people.

Everything that `orc` prints passes `echo` or one of its neighbours here, which let no control character of a log, a
name or an error through (a test sees to it that nothing else prints).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from orc.launchers.control_characters import escape_controls, escape_controls_in_json

# A style travels in a text as this mark, which nobody else knows, and becomes an escape sequence when it is printed:
# so what a log or a name brings along is told apart from what orc itself has coloured.
_MARK = f"<{os.urandom(8).hex()}"
_MARKS = re.compile(rf"{_MARK}([\d;]*)m")

_NARROW = 8  # a column is not cut to less
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
    """Return True for a stream that takes colours: a terminal that is not dumb, and no NO_COLOR."""
    stream = sys.stderr if err else sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, *, err: bool = False, **styles: Any) -> str:
    """Return *text* with click's styles where the stream takes colours, unchanged elsewhere; for `echo` alone."""
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


def confirm(question: str) -> bool:
    """Ask *question* on stderr; return the answer, no by default."""
    return click.confirm(rendered(question), err=True)


def state(name: str) -> str:
    """Return a state's name, coloured by what it means."""
    return style(name, fg=_STATE_COLOURS.get(name), bold=name in ("FAILED", "LOST") or None)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """A block in which what processes print to stdout goes to stderr: stdout is left to the JSON result."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def echo_json(value: Any) -> None:
    """Print one JSON document on stdout, times as ISO texts beside the numbers."""
    click.echo(escape_controls_in_json(json.dumps(with_iso_times(value), indent=2, ensure_ascii=False, default=str)))


def echo_result(as_json: bool, document: Any, text: str) -> None:
    """Print the result of a command: the *document* where *as_json* is true, else the *text*."""
    if as_json:
        echo_json(document)
    else:
        echo(text)


def document(value: Any, form: str | None) -> bool:
    """Print *value* where *form* is json or yaml; return False where it is another one."""
    if form == "json":
        echo_json(value)
    elif form == "yaml":
        import yaml

        plain = json.loads(json.dumps(with_iso_times(value), default=str))  # no tags for what is no plain data
        text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
        click.echo(escape_controls(text), nl=False)
    return form in ("json", "yaml")


def listing(
    form: str | bool | None,
    found: Mapping[str, Any],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    none: str = "",
) -> None:
    """Print *found* where *form* is json (or true) or yaml; else *rows* as a table, where there are none *none*."""
    if document(found, "json" if form is True else form or None):
        return
    if none and not rows:
        echo(none, err=True)
    else:
        echo(table(header, rows))


def with_iso_times(value: Any) -> Any:
    """Return *value* with a key ``..._iso`` behind every ``..._at`` and ``at`` that is seconds since the epoch."""
    if isinstance(value, Mapping):
        found: dict[Any, Any] = {}
        for key, item in value.items():
            found[key] = with_iso_times(item)
            is_time = isinstance(key, str) and (key == "at" or key.endswith("_at")) and f"{key}_iso" not in value
            if is_time and (item is None or (isinstance(item, (int, float)) and not isinstance(item, bool))):
                found[f"{key}_iso"] = None if item is None else iso(item)
        return found
    return [with_iso_times(item) for item in value] if isinstance(value, (list, tuple)) else value


def iso(at: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC, to the millisecond."""
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def echo_json_line(value: Any) -> None:
    """Print one JSON document on one line, for streams of them."""
    click.echo(escape_controls_in_json(json.dumps(value, ensure_ascii=False, default=str)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, fit: bool = True) -> str:
    """Left-aligned columns, two spaces apart; widths ignore styles. A cell that has several lines stays in its row.

    On a terminal the widest columns are cut to its width, the first column never, and none without *fit*.
    """
    cells = [[escape_controls(cell).replace("\n", "\\n") for cell in row] for row in (header, *rows)]
    widths = [max(_width(row[i]) for row in cells) for i in range(len(header))]
    if fit and sys.stdout.isatty():
        widths = _fitted(widths, shutil.get_terminal_size().columns)
        cells = [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines = []
    for number, row in enumerate(cells):
        padded = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
        line = "  ".join(padded).rstrip()
        lines.append(style(line, bold=True) if number == 0 else line)
    return "\n".join(lines)


def _fitted(widths: Sequence[int], columns: int) -> list[int]:
    """Return *widths* that fit into *columns* with two spaces between: the widest give way first, down to `_NARROW`."""
    found = list(widths)
    while sum(found) + 2 * (len(found) - 1) > columns:
        widest = max(range(1, len(found)), key=lambda i: found[i], default=0)
        if not widest or found[widest] <= _NARROW:
            break
        found[widest] -= 1
    return found


def _cut(cell: str, width: int) -> str:
    return cell if _width(cell) <= width else _MARKS.sub("", cell)[: width - 1] + "…"


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
