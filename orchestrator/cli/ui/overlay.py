"""Curves of several jobs over one another, as a few lines of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MARKS = "abcdefghijklmnopqrstuvwxyz"
CROSSING = "*"


def overlay(curves: Sequence[Sequence[tuple[float, float]]], *, width: int, height: int) -> list[str]:
    """Return the ``(x, y)`` of each curve as its letter, on axes that all share; `CROSSING` where curves meet.

    *width* characters with the axis, *height* lines and one. Points that share a column are averaged.
    """
    points = [point for curve in curves for point in curve]
    if not points:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 2
    columns = max(width - margin, 1)
    grid = [[" "] * columns for _ in range(height)]
    for mark, curve in zip(MARKS, curves, strict=False):
        for column, y in _columns(curve, columns, left, right).items():
            row = round((y - low) / (high - low) * (height - 1)) if high > low else height // 2
            grid[row][column] = mark if grid[row][column] in (" ", mark) else CROSSING
    lines = []
    for row in range(height - 1, -1, -1):
        label = labels[0] if row == height - 1 else labels[1] if row == 0 else ""
        lines.append(f"{label.rjust(margin - 2)}  {''.join(grid[row])}".rstrip())
    first, last = f"{left:.10g}", f"{right:.10g}"
    axis = first if first == last else f"{first}{last.rjust(max(columns - len(first), len(last) + 1))}"
    return [*lines, " " * margin + axis]


def _columns(curve: Sequence[tuple[float, float]], columns: int, left: float, right: float) -> dict[int, float]:
    """Return the mean of a curve in each column in which it has a point."""
    found: dict[int, list[float]] = {}
    for x, y in curve:
        column = min(int((x - left) / (right - left) * columns), columns - 1) if right > left else 0
        found.setdefault(column, []).append(y)
    return {column: sum(values) / len(values) for column, values in found.items()}
