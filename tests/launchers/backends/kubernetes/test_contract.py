"""The backend is what a package of its own could be: small, and on what is stable; its page has all of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

import orc.launchers.backends.kubernetes as package
from orc.launchers.backends.kubernetes.options import ClusterOptions, PodOptions, Toleration, Volume
from orc.launchers.testing.surface import unstable_imports

HERE = Path(str(package.__file__)).parent
PAGE = Path(__file__).parents[4] / "docs" / "reference" / "kubernetes-options.md"


def test_it_imports_nothing_of_orc_that_may_change_without_a_new_version_of_the_protocol() -> None:
    found = unstable_imports(package.__name__)
    assert [each for each in found if f" {package.__name__}" not in each] == []


def test_it_has_at_most_1200_lines_that_are_not_blank() -> None:
    lines = [line for file in HERE.glob("*.py") for line in file.read_text().splitlines() if line.strip()]
    assert len(lines) <= 1200


@pytest.mark.parametrize("model", [ClusterOptions, PodOptions, Volume, Toleration])
def test_the_page_has_every_option_with_what_it_means(model) -> None:
    rows = PAGE.read_text().splitlines()
    for name, field in model.model_fields.items():
        assert any(row.startswith(f"| `{name}` | ") and row.endswith(f" | {field.description} |") for row in rows), name
