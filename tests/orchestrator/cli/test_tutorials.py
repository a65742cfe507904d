"""The tutorials that need this machine alone work as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from executed_page import ExecutedPage

TUTORIALS = Path(__file__).parents[3] / "docs/tutorials"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["your-own-script", "laptop-to-slurm"])
def test_the_tutorial_works(name: str, tmp_path: Path, orc_home: Path) -> None:
    page = ExecutedPage((TUTORIALS / f"{name}.md").read_text(), tmp_path)
    page.write_files(orc_home / "config")
    for block in page.commands:
        page.run(block)
    page.check()
