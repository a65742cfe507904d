"""Text on the terminal: styles, tables, JSON, times and sizes for people, errors; and the exit statuses."""

from __future__ import annotations

import datetime
import enum
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.control_characters import escape_controls, escape_controls_in_json
from orc.launchers.errors import LaunchError
from orc.launchers.findings import Finding

if TYPE_CHECKING:
    from pathlib import Path


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


def cells(record: object, names: str) -> list[str]:
    """Return the fields *names* of *record* as texts: times (``..._at``) as `clock`, what is empty as ``-``."""
    values = [(name, getattr(record, name)) for name in names.split()]
    return [clock(v) if name.endswith("_at") else "-" if v in (None, "") else str(v) for name, v in values]


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


class ExitCode(enum.IntEnum):
    """Exit statuses of every command but `orc launch`, which passes on the script's own."""

    OK = 0
    JOB_FAILED = 1  # also: doctor and `clusters check` found an error, `clusters` and `clusters list` a wrong entry
    USAGE = 2  # bad input or usage, or this machine cannot carry it out; nothing was done
    CANCELLED = 3
    NO_SUCH_JOB = 4
    UNREACHABLE = 5
    TIMED_OUT = 6
    INTERNAL = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


# Names of exception classes, so that nothing is imported to compare: the first match in the class's MRO counts.
_BY_CLASS = {
    "JobNotFound": ExitCode.NO_SUCH_JOB,
    "BackendUnreachable": ExitCode.UNREACHABLE,
    "AmbiguousSubmit": ExitCode.UNREACHABLE,
    "LaunchError": ExitCode.USAGE,
}


def of_error(error: BaseException) -> ExitCode:
    """Return the exit status for an exception that ends a command."""
    return next(
        (_BY_CLASS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _BY_CLASS), ExitCode.INTERNAL
    )


def of_states(states: Iterable[str]) -> ExitCode:
    """Return the exit status for jobs that ended in *states*: failure outranks cancellation, which outranks success."""
    seen = set(states)
    if "FAILED" in seen:
        return ExitCode.JOB_FAILED
    return ExitCode.CANCELLED if "CANCELLED" in seen else ExitCode.OK


def report(error: BaseException, arguments: Sequence[str]) -> int:
    """Print *error* as text, or as JSON with ``--json``; return the exit status."""
    problems: list[dict[str, Any]] = []
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        echo(error.format_message(), err=True)
        return int(ExitCode.USAGE)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        code, fields = ExitCode.INTERRUPTED, {"what": "interrupted", "where": "", "do": ""}
    elif isinstance(error, click.ClickException):
        code, fields = ExitCode.USAGE, _usage(error)
    elif isinstance(error, LaunchError):
        code, fields = of_error(error), {"what": error.what, "where": error.where, "do": error.hint}
        problems = _problems(error)
    else:
        code, fields = ExitCode.INTERNAL, _internal(error, arguments)
    if wants_json(arguments):
        document = {"kind": type(error).__name__, **fields, "exit_code": int(code), "problems": problems}
        echo_json({"error": document})
    else:
        echo(block(fields), err=True)
    return int(code)


def _problems(error: LaunchError) -> list[dict[str, Any]]:
    """Return the errors of files, one by one; `file`, `line` and `column` are null where there is none."""
    from orc.launchers.spec.problems import Problem, SpecProblems

    def problem(found: Problem | LaunchError) -> dict[str, Any]:
        place = re.fullmatch(r"(.*):([0-9]+):([0-9]+)", found.where, re.DOTALL)
        file, line, column = (place[1], int(place[2]), int(place[3])) if place else (None, None, None)
        key = getattr(found, "key", "")
        return {"file": file, "line": line, "column": column, "key": key, "message": found.what, "hint": found.hint}

    return [problem(found) for found in (error.problems if isinstance(error, SpecProblems) else [error])]


def block(fields: dict[str, Any], label: str = "error") -> str:
    """Return the text form: ``error: WHAT``, then ``where:`` and ``do:`` where they are known."""
    colour = {"error": "red", "warning": "yellow"}.get(label)
    lines = [f"{style(label + ':', err=True, fg=colour, bold=True)} {_indent(fields['what'], 7)}"]
    for key in ("where", "do"):
        if fields.get(key):
            lines.append(f"  {key + ':':<7}{_indent(fields[key], 9)}")
    return "\n".join(lines)


def warn_unreachable(unreachable: Mapping[str, str], do: str, what: str = "cluster") -> None:
    """Warn about clusters, or *what* else, that did not answer: name -> reason."""
    for name, why in unreachable.items():
        warn(Finding("warning", why, f"{what} {name}", do))


def finding_text(finding: Finding) -> str:
    """Return a finding as a block like an error's."""
    return block({"what": finding.what, "where": finding.where, "do": finding.hint}, finding.level)


def warn(finding: Finding) -> None:
    """Print a finding on stderr."""
    echo(finding_text(finding), err=True)


def _indent(text: str, width: int) -> str:
    return text.rstrip().replace("\n", "\n" + " " * width)


def wants_json(arguments: Sequence[str]) -> bool:
    """Return True for ``--json`` among orc's own arguments; what follows ``--`` or launch's script is the script's."""
    own = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    if own[:1] in (["launch"], ["run"]):
        own = own[: _script_position(own)]
    forms = (["--format", "json"], ["-o", "json"], ["--output", "json"])
    words = ("--json", "--format=json", "--output=json", "-ojson")
    return any(word in words or own[i : i + 2] in forms for i, word in enumerate(own))


def launch_options_with_value() -> set[str]:
    """Return the options of `orc launch` that a value follows, without the command, which reports errors itself."""
    from orc.launchers.accelerate.keys import FLAGS

    own = {"-n", "--nproc", "--python", "--seed", "--stand-in", "--grace"}
    return own | {flag for flag, option in FLAGS.items() if not option.switch}


def _script_position(words: Sequence[str]) -> int:
    """Return the index of launch's script among *words*; parsing may have failed before it got there."""
    with_value = launch_options_with_value()
    position = 1
    while position < len(words) and words[position].startswith("-"):
        position += 2 if words[position] in with_value else 1
    return position


def _usage(error: click.ClickException) -> dict[str, str]:
    context = getattr(error, "ctx", None)
    where = context.command_path if context else ""
    do = f"see `{where} --help`" if where else ""
    return {"what": error.format_message().rstrip("."), "where": where, "do": do}


def _internal(error: BaseException, arguments: Sequence[str]) -> dict[str, str]:
    import traceback

    text = "".join(traceback.format_exception(error))
    summary = f"internal error: {type(error).__name__}: {error}".rstrip(": ")
    where, do = "", "this is a bug in orc; please report it with the traceback above"
    if os.environ.get("ORC_DEBUG"):
        echo(text, err=True)
    elif path := _write_crash(text, arguments):
        where, do = str(path), "this is a bug in orc; please report it with that traceback"
    else:
        do = "run it again with ORC_DEBUG=1 to see the traceback"
    return {"what": summary, "where": where, "do": do}


def _write_crash(text: str, arguments: Sequence[str]) -> Path | None:
    """Keep the traceback in the state directory, private to the user; `None` when that cannot be written either."""
    import time

    try:
        from orc.launchers.paths import state_dir

        folder = state_dir() / "crashes"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        path.touch(mode=0o600)
        # Arguments may hold `--set env.TOKEN=...`: only the command's name is kept.
        path.write_text(f"orc {' '.join(arguments[:1])}\npython {sys.version}\n\n{text}", encoding="utf-8")
    except Exception:  # noqa: BLE001  a report about a report would hide the first error
        return None
    return path
