"""Training jobs as objects of SageMaker's own SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orc.launchers.backends.sagemaker.backend import SagemakerBackend

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster


def training_job(cluster: Cluster | str, name: str) -> Any:
    """Return a training job as an object of the SDK: to wait for it, to register its model, to deploy it.

        job = training_job("aws", "orc-digits-k3f9a2-a1")
        job.wait()
        job.model_artifacts.s3_model_artifacts

    Args:
        cluster: A cluster of kind sagemaker, or its name in clusters.yaml. Its profile and region are those of the job.
        name: The native id of an attempt, as ``orc status`` shows it.

    Returns:
        The `sagemaker.core.resources.TrainingJob`.

    Raises:
        BackendError: There is no such training job, or AWS refuses to show it.
        BackendUnreachable: AWS does not answer, or the SDK is not installed.
    """
    from orc.launchers.spec.clusters import get_cluster

    backend = SagemakerBackend(get_cluster(cluster) if isinstance(cluster, str) else cluster)
    return backend.aws.training_job(name)
