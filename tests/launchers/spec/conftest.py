"""Job files made on the spot, and their complaints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from orc.launchers.errors import SpecError
from orc.launchers.spec import LoadedJob, load_job


class JobFiles:
    """Writes ``job.yaml`` beside a ``train.py`` and loads it by its bare name, as a user in that directory would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "train.py").write_text("print('hello')\n")

    def load(
        self,
        text: str | bytes,
        overrides: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cluster: str | None = None,
    ) -> LoadedJob:
        (self.directory / "job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        with mock.patch.dict(os.environ, env or {}, clear=True):
            return load_job("job.yaml", overrides, cluster=cluster)

    def complaint(self, text: str | bytes, *args: Any, **kwargs: Any) -> str:
        """The whole error text that loading *text* gives."""
        with pytest.raises(SpecError) as caught:
            self.load(text, *args, **kwargs)
        return str(caught.value)


@pytest.fixture
def job_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFiles:
    directory = tmp_path / "project"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return JobFiles(directory)


@pytest.fixture
def complaint(job_files: JobFiles) -> Callable[..., str]:
    return job_files.complaint
