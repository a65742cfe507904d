"""Curves as a few lines of text: one filled with blocks, or several over one another. Pure.

Both are *width* characters wide with the axis, and *height* lines high and one more. Points that share a column are
averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    start, span = points[0][0], points[-1][0] - points[0][0]
    count = width if span else 1
    sums = [(0.0, 0)] * count
    for x, y in points:
        column = min(int((x - start) / span * count), count - 1) if span else 0
        total, number = sums[column]
        sums[column] = (total + y, number + 1)
    values: list[float] = []
    for total, number in sums:
        values.append(total / number if number else values[-1])
    return values


def _means(curve: Curve, columns: int, left: float, right: float) -> dict[int, float]:
    """Return the mean of a curve in each column in which it has a point."""
    found: dict[int, list[float]] = {}
    for x, y in curve:
        column = min(int((x - left) / (right - left) * columns), columns - 1) if right > left else 0
        found.setdefault(column, []).append(y)
    return {column: sum(values) / len(values) for column, values in found.items()}
