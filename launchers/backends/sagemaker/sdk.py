"""Objects of SageMaker's own SDK, version 3: its modules, and the URIs of its stock images."""

from __future__ import annotations

import importlib
from typing import Any

from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.errors import BackendError


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
