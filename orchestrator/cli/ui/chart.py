"""A curve as a few lines of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " .:|"


def chart(points: Sequence[tuple[float, float]], *, width: int, height: int, plain: bool = False) -> list[str]:
    """``(x, y)`` as columns of blocks (of dots with *plain*), *width* characters with the axis, *height* lines and one.

    Points that share a column are averaged; columns between points take the value before them. x must not fall.
    """
    if not points:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 2
    columns = _columns(points, max(width - margin, 1))
    glyphs = _PLAIN if plain else _BLOCKS
    full = len(glyphs) - 1
    span = high - low
    # The lowest value still shows: a column without a mark is one without a value.
    levels = [max(1, round((y - low) / span * height * full)) if span else height * full // 2 or 1 for y in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        label = labels[0] if row == height - 1 else labels[1] if row == 0 else ""
        marks = "".join(glyphs[min(max(level - row * full, 0), full)] for level in levels)
        lines.append(f"{label.rjust(margin - 2)}  {marks}".rstrip())
    first, last = f"{points[0][0]:.10g}", f"{points[-1][0]:.10g}"
    axis = first if first == last else f"{first}{last.rjust(max(len(columns) - len(first), len(last) + 1))}"
    return [*lines, " " * margin + axis]


def _columns(points: Sequence[tuple[float, float]], width: int) -> list[float]:
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
