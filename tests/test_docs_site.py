"""The documentation's site: it builds without a warning, has every public name, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orc.runtime import HOMES

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(400)  # the first test builds the site, which takes long on a busy machine


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once with every warning an error: dead links and anchors, pages outside of the navigation."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=280
    )
    assert built.returncode == 0, built.stderr + built.stdout
    return place


def test_the_reference_has_every_public_name_of_the_runtime(site: Path) -> None:
    found = {
        anchor
        for page in (site / "reference/api").glob("*.html")
        for anchor in re.findall(r'<h2 id="(orc\.runtime\.[\w.]+)"', page.read_text())
    }
    assert {f"orc.runtime.{module}.{name}" for name, module in HOMES.items()} <= found


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetched = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not fetched, f"{page}: {fetched}"


def test_the_search_index_has_text_of_every_page(site: Path) -> None:
    index = (site / "search/search_index.json").read_text()
    assert "how-to/troubleshooting.html" in index
    assert "reference/api/accelerator.html" in index
