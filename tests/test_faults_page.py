"""Every row of the page of faults names the test that makes the fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "explanation" / "faults.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| [a-z]+ \|", line) and not line.startswith("| backend ")
]


@pytest.mark.parametrize("row", [row for row in ROWS if "::" in row[-1]], ids=lambda row: f"{row[0]}: {row[1]}")
def test_the_test_of_a_row_exists(row: list[str]) -> None:
    assert len(row) == 6
    assert all(row), "a cell is empty"
    file, _, name = row[-1].strip("`").partition("::")
    assert any(re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE) for path in TESTS.rglob(file))


def test_every_row_of_the_table_of_faults_names_a_test() -> None:
    table = [row for row in ROWS if len(row) == 6]
    assert [row[:2] for row in table if "::" not in row[-1]] == []
    assert {"slurm", "ssh"} <= {row[0] for row in table}
