"""What `orc` imports, checked in fresh processes: start-up time is made of imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orc.orchestrator.client import Client

HEAVY = {"torch", "boto3", "google", "paramiko", "fabric", "sqlalchemy", "alembic", "rich", "psutil", "numpy", "httpx"}


@pytest.fixture(autouse=True)
def _made_before(place: Path) -> None:
    """Make the ledger, which the first command of all does with SQLAlchemy."""
    Client(reconciler=False).close()


def _imports(*arguments: str) -> set[str]:
    code = (
        "import sys\n"
        "from orc.orchestrator.cli.main import main\n"
        f"code = main({list(arguments)!r})\n"
        "sys.stderr.write('\\n'.join(sys.modules))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def _top(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_help_imports_click_and_our_table_only(place: Path) -> None:
    modules = _imports("--help")
    assert not _top(modules) & (HEAVY | {"pydantic", "pydantic_core", "yaml", "jinja2", "sqlite3"})
    assert {m for m in modules if m.startswith("orc.")} <= {
        "orc.orchestrator",
        "orc.orchestrator.cli",
        "orc.orchestrator.cli.main",
    }


def test_render_imports_nothing_heavy(place: Path, job_file: Callable[..., str]) -> None:
    modules = _imports("render", job_file())
    assert not _top(modules) & (HEAVY | {"sqlite3", "asyncio"})
    assert not {m for m in modules if m.startswith("orc.orchestrator.ledger")}


@pytest.mark.parametrize("arguments", [["list"], ["status"], ["init"], ["clusters"], ["completion", "bash"]])
def test_quick_commands_import_nothing_heavy(arguments: list[str], place: Path) -> None:
    assert not _top(_imports(*arguments)) & HEAVY


@pytest.mark.parametrize("arguments", [["list"], ["status"], ["completion", "bash"]])
def test_commands_that_read_no_job_file_do_not_import_its_models(arguments: list[str], place: Path) -> None:
    modules = _imports(*arguments)
    assert not _top(modules) & {"pydantic", "pydantic_core"}
    assert "orc.launchers.spec.job" not in modules
    assert "importlib.metadata" not in modules  # entry points are read for kinds that are not ours


def test_the_status_of_a_live_job_needs_its_cluster_and_not_the_models_of_job_files(
    place: Path, job_file: Callable[..., str]
) -> None:
    _imports("submit", job_file("name: naps\ncommand: sleep 60\nlauncher: python\n"))
    try:
        assert "orc.launchers.spec.job" not in _imports("status")
    finally:
        _imports("cancel", "naps")


def test_the_status_of_an_ended_job_asks_no_cluster(place: Path, job_file: Callable[..., str]) -> None:
    _imports("submit", job_file("name: quick\ncommand: 'true'\nlauncher: python\n"), "--no-reconciler", "--follow")
    assert "orc.orchestrator.engine.reconciler" not in _imports("status", "quick")
