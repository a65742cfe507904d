"""A client over a fake backend, a clock that a test moves, and job files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the fakes, which subprocesses import as well

from fake_backend import FakeBackend  # noqa: E402
from fake_clock import Clock  # noqa: E402

from orc.launchers.spec import LoadedJob, load_job  # noqa: E402
from orc.orchestrator.client import Client  # noqa: E402


@pytest.fixture
def clock(bare_runtime: None) -> Clock:
    return Clock()


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    return FakeBackend(tmp_path / "fake")


@pytest.fixture
def client(orc_home: Path, backend: FakeBackend, clock: Clock) -> Iterator[Client]:
    with Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep) as made:
        yield made


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., LoadedJob]:
    """Writes a job file with these keys over a tiny default and loads it."""

    def write(**keys: Any) -> LoadedJob:
        directory = tmp_path / "project"
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text("print('training')\n")
        path = directory / "job.yaml"
        path.write_text(yaml.safe_dump({"name": "digits", "script": "train.py", "launcher": "python", **keys}))
        return load_job(path)

    return write


@pytest.fixture
def subprocess_env(orc_home: Path) -> dict[str, str]:
    """The environment of a process that may import `fake_backend`."""
    return {**os.environ, "PYTHONPATH": str(HERE)}
