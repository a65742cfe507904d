"""Stand-ins for the libraries of trackers that are too large to install for tests, or need an account."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from orc.runtime.core.availability import is_package

STAND_INS = Path(__file__).with_name("standins")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    """Trackers write below *tmp_path*, reach no server, and are looked for anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # MLflow's default, a SQLite database, takes seconds to make; its file store must be asked for twice.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("EXPERIMENT_NAME", "RUN_ID", "TAGS", "NESTED_RUN"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    is_package.cache_clear()
    yield
    is_package.cache_clear()


@pytest.fixture
def stand_in(monkeypatch):
    """``stand_in("aim")``: the recording module of that name takes the library's place; its CALLS come back."""
    names = []

    def install(name):
        monkeypatch.syspath_prepend(str(STAND_INS))
        _forget(name)
        names.append(name)
        return importlib.import_module(name).CALLS

    yield install
    for name in names:
        _forget(name)


def _forget(name):
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[module]


@pytest.fixture
def without_library(monkeypatch):
    """``without_library("wandb")``: as if it were not installed."""

    def hide(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)
        is_package.cache_clear()

    return hide
