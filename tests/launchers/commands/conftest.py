"""Jobs and what commands make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from orc.launchers.commands import build_command
from orc.launchers.commands.base import NodeCommand
from orc.launchers.errors import RenderError
from orc.launchers.spec import JobSpec


def job(**settings: Any) -> JobSpec:
    """A job with a script, unless another program is given."""
    program = {} if {"module", "command"} & set(settings) else {"script": "train.py"}
    return JobSpec.model_validate({"name": "x", **program, **settings})


Build = Callable[..., NodeCommand]
Refusal = Callable[..., str]


@pytest.fixture
def build() -> Build:
    """``build("torchrun", {"monitor_interval": 1}, resources=...)``."""

    def build(kind: str, options: Mapping[str, Any] | None = None, **settings: Any) -> NodeCommand:
        return build_command(job(launcher={"kind": kind, "options": dict(options or {})}, **settings))

    return build


@pytest.fixture
def refusal(build: Build) -> Refusal:
    """Why the command cannot carry such a job."""

    def refusal(kind: str, options: Mapping[str, Any] | None = None, **settings: Any) -> str:
        with pytest.raises(RenderError) as caught:
            build(kind, options, **settings)
        before, _, reason = caught.value.what.partition(f"launcher {kind} cannot run this job: ")
        assert before == ""
        return reason

    return refusal
