"""Keys of function jobs: made once, durable, and never empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from orc.launchers.errors import LaunchError
from orc.orchestrator.functions.calls import key_of, new_key
from orc.orchestrator.functions.node import KEY_VARIABLE, signed, verified


def test_a_key_is_read_as_it_was_made(tmp_path: Path) -> None:
    made = new_key(tmp_path, "a" * 64)
    assert len(made[KEY_VARIABLE]) == 64
    assert key_of(tmp_path, "a" * 64) == made
    assert key_of(tmp_path, "b" * 64) == {}


def test_a_key_is_never_made_over_another_one(tmp_path: Path) -> None:
    made = new_key(tmp_path, "a" * 64)
    with pytest.raises(LaunchError, match="File exists"):
        new_key(tmp_path, "a" * 64)
    assert key_of(tmp_path, "a" * 64) == made
    assert len(list((tmp_path / "functions").iterdir())) == 1


def test_a_key_that_a_crash_has_emptied_verifies_nothing(tmp_path: Path) -> None:
    new_key(tmp_path, "a" * 64)
    (tmp_path / "functions" / f"{'a' * 64}.key").write_text("")
    assert key_of(tmp_path, "a" * 64) == {}


def test_a_key_that_cannot_be_kept_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "functions").write_text("in the way")
    with pytest.raises(LaunchError, match="cannot keep the key") as caught:
        new_key(tmp_path, "a" * 64)
    assert caught.value.where.endswith(".key")


def test_what_is_signed_for_one_job_is_not_read_for_another() -> None:
    key = "ab" * 32
    content = signed(key, "job-1/results/a1-rank-0.pkl", b"data")
    assert verified(key, "job-1/results/a1-rank-0.pkl", content) == b"data"
    with pytest.raises(ValueError, match="was not written by this job"):
        verified(key, "job-2/results/a1-rank-0.pkl", content)
