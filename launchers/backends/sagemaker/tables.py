"""Tables that a configuration file may name: two columns, separated by a tab, with or without their heading."""

from __future__ import annotations

from pathlib import Path

from orc.launchers.errors import SpecError


def read_table(path: str, where: str, columns: tuple[str, str]) -> tuple[dict[str, str], Path]:
    """Return the rows of a table, and its file; a relative *path* starts beside the file in *where*.

    Raises `SpecError`.
    """
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
    return rows, file
