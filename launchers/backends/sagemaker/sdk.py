"""Objects of SageMaker's own SDK, version 3: the URIs of its stock images, and training jobs as its `TrainingJob`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.errors import BackendError

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
        BackendError: There is no such training job, AWS refuses to show it, or the SDK is not installed.
        BackendUnreachable: AWS does not answer.
    """
    from orc.launchers.backends.sagemaker.backend import SagemakerBackend
    from orc.launchers.spec.clusters import get_cluster

    backend = SagemakerBackend(get_cluster(cluster) if isinstance(cluster, str) else cluster)
    return backend.aws.training_job(name)


def stock_image(image: Image, where: str) -> str:
    """Return the URI of a stock image, from the tables of the SDK that is installed. Raises `BackendError`."""
    framework, version, base = "pytorch", image.pytorch, None
    if image.transformers:
        framework, version = "huggingface", image.transformers
        base = f"pytorch{image.pytorch}" if image.pytorch else None
    try:
        return str(
            sdk_module("sagemaker.core.image_uris").retrieve(
                framework,
                image.region,
                version=version,
                base_framework_version=base,
                py_version=image.python,
                instance_type=image.instance_type,
                image_scope="training",
            )
        )
    except (ValueError, KeyError) as error:
        raise BackendError(
            f"there is no stock image for that: {' '.join(str(error).split())}",
            where=where,
            hint="Correct the versions, or give an image_uri.",
        ) from None


def sdk_module(name: str) -> Any:
    """Import a module of the SDK, or boto3. Raises `BackendError` when it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BackendError(
            f"clusters of kind sagemaker need the package {error.name or 'sagemaker'}, version 3 of the SDK",
            hint="Install it: pip install 'orc-launch[aws]'",
        ) from None
