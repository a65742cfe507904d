"""The plug-in itself: its options, and the collection of the suite. Does nothing without ``--orc-backend``."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

SUITE = Path(__file__).parent / "suite"
MODULES = ("contract", "controlling", "failing", "running")
pytest.register_assert_rewrite("orc.launchers.testing.suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("orc", "conformance suite of orc's backends")
    group.addoption(
        "--orc-backend", metavar="MODULE:CLASS", help="Run the suite on this backend; without paths, the suite alone."
    )
    group.addoption(
        "--orc-cluster",
        metavar="FILE:NAME",
        help="The cluster to run it on, of a clusters.yaml; by default one whose root is a directory of the test.",
    )
    group.addoption(
        "--orc-view",
        metavar="MODULE:FUNCTION",
        help="Where attempts are seen from here, if not at their own paths: (backend, plan, path) -> all copies.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixtures, and choose the suite where no paths are given."""
    if not config.getoption("--orc-backend"):
        return
    from orc.launchers.testing import fixtures

    config.pluginmanager.register(fixtures, "orc.launchers.testing.fixtures")
    config.addinivalue_line("markers", "distributed: starts several torch processes")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(SUITE / f"{name}.py") for name in MODULES]


class SuiteModule(pytest.Module):
    """Module of the suite, by its own name: pytest would make up another one for a path in an installed package."""

    def _getobj(self) -> Any:
        return importlib.import_module(f"orc.launchers.testing.suite.{self.path.stem}")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect the modules of the suite."""
    return SuiteModule.from_parent(parent, path=module_path) if module_path.parent == SUITE else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what trains where there is no torch."""
    if config.getoption("--orc-backend") and importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("distributed"):
                item.add_marker(pytest.mark.skip(reason="torch is not installed"))
