"""Completion of ``--set``: keys of a job file, and values where there are few."""

from __future__ import annotations

import pytest

from orc.orchestrator.cli.completion import VALUE_ALONE, complete
from orc.orchestrator.cli.main import main


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("res", ["resources."]),
        ("resources.n", ["resources.nodes="]),
        ("resources.options.slurm.part", ["resources.options.slurm.partition="]),
        ("resources.options.tpu.accel", ["resources.options.tpu.accelerator_type="]),
        ("launcher=t", ["launcher=torchrun"]),
        ("checkpoint.resume=", ["checkpoint.resume=auto", "checkpoint.resume=never"]),
        ("cluster=", ["cluster=local"]),
        ("runtime.mixed_precision=b", ["runtime.mixed_precision=bf16"]),
        ("core_dumps=", ["core_dumps=true", "core_dumps=false"]),
        ("runtime.seed=", []),
        ("nonsense.", []),
    ],
)
def test_keys_and_values(typed: str, offered: list[str]) -> None:
    assert [item.value for item in complete(typed)] == offered


def test_keys_come_with_what_they_mean() -> None:
    assert {item.value: item.help for item in complete("grace")} == {"grace=": "Seconds between SIGTERM and SIGKILL."}


@pytest.mark.parametrize(
    ("words", "current", "offered"),
    [
        ("orc submit --set launcher =", 4, "python"),  # right behind the sign
        ("orc submit --set launcher = p", 5, "python"),
        ("orc submit job.yaml --set name = x --set checkpoint.resume = n", 10, "never"),
        ("orc submit --set name = x --set gra", 7, "grace="),
        ("orc submit --set name = x --foll", 6, "--follow"),
        ("orc launch --mixed_precision b", 3, "bf16"),
    ],
)
def test_bash_splits_at_the_equals_sign(
    words: str, current: int, offered: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_ORC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(current))
    monkeypatch.setenv(VALUE_ALONE, "")
    main([])
    assert f"plain,{offered}\n" in capfd.readouterr().out
