"""`orc metrics`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import BackendUnreachable, LaunchError
from orc.orchestrator.cli.invocation import following_option, json_option, open_client, optional_jobs_argument
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, echo_json_line
from orc.orchestrator.insight.metrics import course, names, series

if TYPE_CHECKING:
    from orc.orchestrator.clients.surface import JobsClient, MetricsReader
    from orc.orchestrator.insight.metrics import Line

ROWS = 10
HEIGHT = 8
INTERVAL_S = 1.0
# What the table shows beside the step, as far as it was measured.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "LOSS", lambda v: f"{v:.4g}"),
    ("grad_norm", "GRAD NORM", lambda v: f"{v:.3g}"),
    ("samples_per_s", "SAMPLES/S", lambda v: f"{v:.1f}"),
    ("tokens_per_s", "TOKENS/S", lambda v: f"{v:.0f}"),
    ("step_s", "STEP", lambda v: f"{v * 1000:.1f} ms"),
    ("data_wait", "DATA WAIT", lambda v: f"{v:.0%}"),
    ("mfu", "MFU", lambda v: f"{v:.1%}"),
    ("memory_peak", "GPU PEAK", lambda v: f"{v / 1e9:.1f} GB"),
)


@click.command("metrics")
@optional_jobs_argument
@following_option
@click.option("--name", "wanted", multiple=True, help="Draw this measurement instead of the loss. May be repeated.")
@click.option("--tail", type=click.IntRange(0), default=ROWS, show_default=True, help="Rows of the table.")
@json_option
def metrics_command(jobs: tuple[str, ...], following: bool, wanted: tuple[str, ...], tail: int, as_json: bool) -> None:
    """Show the metrics of JOB (default: the newest): a table of its values, its loss as a curve.

    Of several JOBs the last values are a table, and their curves are drawn over one another. With --json every line of
    the job's metrics.jsonl is printed, over all attempts and hosts; of several jobs with a key "job".
    """
    client = open_client()
    if len(jobs) > 1:
        if following:
            raise click.UsageError("--follow takes one job", click.get_current_context())
        _compare(client, list(dict.fromkeys(client.resolve(job) for job in jobs)), wanted or ("loss",), as_json)
        return
    job_id = client.resolve(jobs[0] if jobs else "@last")
    reader, lines = _read(client, job_id)
    if not following and not lines:
        raise _nothing(client, job_id)
    show = _print_json if as_json else _Table().show
    if as_json:
        show(lines)
    else:
        counted = course(lines)
        _refuse_unknown(wanted, counted, job_id)
        show(counted[-tail:] if tail else [])
    if following:
        for new in _growth(client, job_id, reader):
            lines += new
            show(new)
    if not lines:
        raise _nothing(client, job_id)
    if not as_json:
        for text in _curves(course(lines), wanted or ("loss",)):
            echo(text)


def _read(client: JobsClient, job_id: str) -> tuple[MetricsReader, list[Line]]:
    """Return a reader and what it has read; warn about hosts that did not answer."""
    with waiting(f"reading the measurements of {job_id}"):
        reader = client.metrics(job_id)
        lines = reader.read()
    silent = {host: error.what for host, error in reader.unreachable.items()}
    output.warn_unreachable(silent, f"its part of {job_id} is missing below", "host")
    return reader, lines


def _compare(client: JobsClient, job_ids: Sequence[str], wanted: Sequence[str], as_json: bool) -> None:
    """Print the last values of several jobs, and their curves over one another."""
    if len(job_ids) > len(MARKS):
        raise LaunchError(f"{len(job_ids)} curves cannot be told apart", hint=f"give {len(MARKS)} jobs at most")
    measured = {job_id: _read(client, job_id)[1] for job_id in job_ids}
    if as_json:
        for job_id, lines in measured.items():
            _print_json([{"job": job_id, **line} for line in lines])
        return
    counted = {job_id: course(lines) for job_id, lines in measured.items()}
    _refuse_unknown(wanted, [line for lines in counted.values() for line in lines], ", ".join(job_ids))
    curves = {name: [series(lines, name) for lines in counted.values()] for name in wanted}
    rows = []
    for number, (job_id, lines) in enumerate(counted.items()):
        values = [f"{curve[number][-1][1]:.4g}" if curve[number] else "-" for curve in curves.values()]
        rows.append([MARKS[number], job_id, _plain(lines[-1] if lines else {}, "step"), *values])
    echo(output.table(["", "JOB", "STEP", *(name.upper() for name in wanted)], rows))
    for name, curve in curves.items():
        if drawn := overlay(curve, width=_width(), height=HEIGHT):
            echo("\n".join(["", output.style(name, bold=True), *drawn]))


def _width() -> int:
    return min(shutil.get_terminal_size((80, 24)).columns, 120)


def _nothing(client: JobsClient, job_id: str) -> Exception:
    view = client.job(job_id)
    hint = "a script measures with orc.runtime, unless the job sets `runtime: {metrics: false}`"
    if not view.ended:
        hint = f"`orc metrics -f {job_id}` waits for the first values; " + hint
    return LaunchError(f"the job has measured nothing so far: {jobtext.headline(view)}", where=job_id, hint=hint)


def _refuse_unknown(wanted: Sequence[str], lines: Sequence[Line], job_id: str) -> None:
    known = names(lines)
    if unknown := [name for name in wanted if lines and name not in known]:
        what = f"nothing called {unknown[0]!r} was measured"
        raise LaunchError(what, where=job_id, hint=f"there is {', '.join(known)}")


def _growth(client: JobsClient, job_id: str, reader: MetricsReader) -> Iterator[list[Line]]:
    """Print the measurements from now on, until the job has ended."""
    from orc.orchestrator.cli.ui.tail import Watch

    watch = Watch(client, job_id)
    while True:
        ended = watch.poll().ended
        try:
            if new := reader.read():
                yield new
        except BackendUnreachable:
            if ended:
                raise  # otherwise `Watch.look` has said so, and it is tried again
        if ended:
            return
        time.sleep(INTERVAL_S)


def _print_json(lines: Sequence[Line]) -> None:
    for line in lines:
        echo_json_line(line)


class _Table:
    """Rows that may come one after the other: the widths are those of the first ones, or of the header."""

    def __init__(self) -> None:
        self._columns: list[tuple[str, str, Callable[[float], str]]] = []
        self._widths: list[int] = []

    def show(self, lines: Sequence[Line]) -> None:
        """Print *lines*, the first time below a header."""
        if not lines:
            return
        begins = not self._columns
        if begins:
            self._columns = [c for c in _COLUMNS if any(isinstance(line.get(c[0]), (int, float)) for line in lines)]
        rows = [self._cells(line) for line in lines]
        header = ["AT", "ATTEMPT", "EPOCH", "STEP", *(title for _, title, _ in self._columns)]
        if begins:
            self._widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
            echo(output.style(self._line(header), bold=True))
        for row in rows:
            echo(self._line(row))

    def _cells(self, line: Line) -> list[str]:
        at = line.get("at")
        cells = [output.clock(at if isinstance(at, (int, float)) else None)]
        cells += [_plain(line, name) for name in ("attempt", "epoch", "step")]
        for name, _, show in self._columns:
            value = line.get(name)
            cells.append(show(value) if isinstance(value, (int, float)) else "-")
        return cells

    def _line(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip()


def _plain(line: Mapping[str, Any], name: str) -> str:
    value = line.get(name)
    return "-" if value is None else f"{value:.10g}" if isinstance(value, (int, float)) else str(value)


def _curves(lines: Sequence[Line], wanted: Sequence[str]) -> list[str]:
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    found: list[str] = []
    for name in wanted:
        points = series(lines, name)
        if len(points) < 2:
            continue
        last = f"{points[-1][1]:.4g} at step {points[-1][0]:.10g}"
        drawn = chart(points, width=_width(), height=HEIGHT, plain=plain)
        found += ["", f"{output.style(name, bold=True)}  {last}", *drawn]
    return found


MARKS = "abcdefghijklmnopqrstuvwxyz"
CROSSING = "*"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " .:|"

Curve = Sequence[tuple[float, float]]


def chart(points: Curve, *, width: int, height: int, plain: bool = False) -> list[str]:
    """Return ``(x, y)`` as columns of blocks (of dots with *plain*).

    Columns between points take the value before them. x must not fall.
    """
    if not points:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    columns = _filled(points, max(width - _margin(low, high), 1))
    glyphs = _PLAIN if plain else _BLOCKS
    full = len(glyphs) - 1
    span = high - low
    # The lowest value still shows: a column without a mark is one without a value.
    levels = [max(1, round((y - low) / span * height * full)) if span else height * full // 2 or 1 for y in columns]
    rows = [
        "".join(glyphs[min(max(level - row * full, 0), full)] for level in levels) for row in range(height - 1, -1, -1)
    ]
    return _framed(rows, (low, high), (points[0][0], points[-1][0]), len(columns))


def overlay(curves: Sequence[Curve], *, width: int, height: int) -> list[str]:
    """Return the ``(x, y)`` of each curve as its letter, on axes that all share; `CROSSING` where curves meet."""
    points = [point for curve in curves for point in curve]
    if not points:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    columns = max(width - _margin(low, high), 1)
    grid = [[" "] * columns for _ in range(height)]
    for mark, curve in zip(MARKS, curves, strict=False):
        for column, y in _means(curve, columns, left, right).items():
            row = round((y - low) / (high - low) * (height - 1)) if high > low else height // 2
            grid[row][column] = mark if grid[row][column] in (" ", mark) else CROSSING
    return _framed(["".join(row) for row in reversed(grid)], (low, high), (left, right), columns)


def _margin(low: float, high: float) -> int:
    return max(len(f"{low:.4g}"), len(f"{high:.4g}")) + 2


def _framed(rows: Sequence[str], ys: tuple[float, float], xs: tuple[float, float], columns: int) -> list[str]:
    """Return *rows*, the highest first, with the ends of both axes."""
    margin = _margin(*ys)
    labels = {len(rows) - 1: f"{ys[0]:.4g}", 0: f"{ys[1]:.4g}"}
    lines = [f"{labels.get(number, '').rjust(margin - 2)}  {row}".rstrip() for number, row in enumerate(rows)]
    first, last = f"{xs[0]:.10g}", f"{xs[1]:.10g}"
    axis = first if first == last else f"{first}{last.rjust(max(columns - len(first), len(last) + 1))}"
    return [*lines, " " * margin + axis]


def _filled(points: Curve, width: int) -> list[float]:
    """Return the value of each column."""
    start, end = points[0][0], points[-1][0]
    count = width if end > start else 1
    means = _means(points, count, start, end)
    values: list[float] = []
    for column in range(count):
        values.append(means[column] if column in means else values[-1])
    return values


def _means(curve: Curve, columns: int, left: float, right: float) -> dict[int, float]:
    """Return the mean of a curve in each column in which it has a point."""
    found: dict[int, list[float]] = {}
    for x, y in curve:
        column = min(int((x - left) / (right - left) * columns), columns - 1) if right > left else 0
        found.setdefault(column, []).append(y)
    return {column: sum(values) / len(values) for column, values in found.items()}
