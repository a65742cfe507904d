"""Where people are told that the checkpoints of a SageMaker job are."""

from __future__ import annotations

from orc.launchers.backends.sagemaker.rendering import checkpoints_of


def test_the_checkpoints_of_a_job_are_in_s3_and_a_directory_of_its_own_beside_its_records(cluster, job) -> None:
    place = "s3://my-bucket/orc/jobs/digits-k3f9a2/checkpoints"
    assert checkpoints_of(job(), "digits-k3f9a2", cluster()) == place
    own = job(checkpoint={"dir": "mine"})
    assert checkpoints_of(own, "digits-k3f9a2", cluster()) == f"{place}/.orc/digits-k3f9a2/mine"
