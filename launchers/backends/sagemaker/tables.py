"""The two tables that a configuration file may name: channels of data, and metrics. Columns are separated by tabs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orc.launchers.backends.sagemaker import readers
from orc.launchers.errors import SpecError
from orc.launchers.spec.options import Reader


def read_inputs(path: str, where: str) -> dict[str, Any]:
    """Channels by name, from lines ``channel_name <tab> data_location``. Raises `SpecError`."""
    return dict(_checked(path, where, ("channel_name", "data_location"), readers.inputs))


def read_metrics(path: str, where: str) -> tuple[Any, ...]:
    """Metrics, from lines ``metric_name <tab> metric_regex``. Raises `SpecError`."""
    return tuple(_checked(path, where, ("metric_name", "metric_regex"), readers.metrics))


def _checked(path: str, where: str, columns: tuple[str, str], read: Reader) -> Any:
    file = Path(path).expanduser()
    if not file.is_absolute():
        source = where.partition(":")[0]
        file = Path(source).parent / file if source.endswith((".yaml", ".yml")) else file
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}", where=where) from None
    rows: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.split("\t")]
        if not line.strip() or (number == 1 and tuple(cells) == columns):
            continue
        if len(cells) != 2 or not all(cells):
            raise SpecError(f"expected {columns[0]} and {columns[1]}, separated by a tab", where=f"{file}:{number}")
        if cells[0] in rows:
            raise SpecError(f"{cells[0]} is listed twice", where=f"{file}:{number}")
        rows[cells[0]] = cells[1]
    try:
        return read(rows)
    except ValueError as error:
        raise SpecError(str(error), where=str(file)) from None
