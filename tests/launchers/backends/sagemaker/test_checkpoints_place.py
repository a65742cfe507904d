"""Where people are told that the checkpoints of a SageMaker job are."""

from __future__ import annotations

from pathlib import Path

import pytest

from orc.launchers.backends.sagemaker.rendering import checkpoints_of


@pytest.mark.parametrize("mode", ["contract", None])
def test_a_job_that_stays_on_this_machine_names_no_place_in_s3(cluster, job, tmp_path: Path, mode: str | None) -> None:
    spec = job({"local": mode} if mode else {})
    place = checkpoints_of(spec, "digits-k3f9a2", cluster(), tmp_path)
    if mode:
        assert place.startswith(f"{tmp_path}/sagemaker/s3/")
    else:
        assert place.startswith("s3://")
