"""The pages that begin with a service work as they stand, from the first token to the diagnosis."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from executed_page import ExecutedPage
from test_serve import serving

DOCS = Path(__file__).parents[3] / "docs"
WALK_THROUGH = (DOCS / "how-to/run-the-service.md").read_text().partition("## Walk through")[2].partition("\n## ")[0]
PAGES = {
    "how-to": (WALK_THROUGH, ("ada (admin)", "step 4 loss 0.200", '"action":"submit_job"')),
    "tutorial": ((DOCS / "tutorials/team.md").read_text(), ("grace (user)", "FAILED")),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_walk_through_works(name: str, tmp_path: Path, orc_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, words = PAGES[name]
    monkeypatch.setenv("HOME", str(orc_home))
    page = ExecutedPage(text, tmp_path)
    page.write_files(orc_home / "config")
    start, *others = page.commands
    assert start.endswith("orc serve\n")
    page.run(start.removesuffix("orc serve\n"))
    with serving() as (url, _):
        port = str(httpx.URL(url).port)
        assert url == f"http://127.0.0.1:{port}"
        for block in others:
            page.run(block.replace("8770", port))
        assert httpx.get(f"{url}/").headers["content-type"].startswith("text/html")
        assert httpx.get(f"{url}/api/v1/jobs").status_code == 401
    said = page.check(port)
    assert [word for word in words if word not in said] == []
    assert (orc_home / ".ada.token").stat().st_mode & 0o077 == 0
    assert "looks like credentials" not in said
