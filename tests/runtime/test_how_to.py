"""The how-to pages on the runtime: their examples run."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs/how-to"


@pytest.mark.parametrize(
    "page", ["track-experiments", "profile", "local-sgd", "test-distributed-code", "../reference/utilities"]
)
def test_examples_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    namespace = {"__name__": page}
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), namespace)
    if page == "track-experiments":
        assert (tmp_path / "run.txt").read_text() == "config {'learning_rate': 0.01}\n1 {'loss': 0.5}\n"
    if page == "profile":
        assert sorted(path.name for path in tmp_path.rglob("*.json")) == [
            "profile_0.json",
            "profile_0.json",
            "profile_0_cycle0.json",
        ]
