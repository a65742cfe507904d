"""SageMaker's own SDK, version 3, as far as orc uses it: to create training jobs and to look up stock images.

Its telemetry is off, and no defaults of configuration files get into a request: what was rendered is what is sent.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.errors import BackendError

# The SDK reads its configuration from files named here, at every call. Whoever administers the machine, or the user,
# may have defaults there; a request with them would not be the one that the plan shows.
_CONFIG_VARIABLES = ("SAGEMAKER_USER_CONFIG_OVERRIDE", "SAGEMAKER_ADMIN_CONFIG_OVERRIDE")
_CONFIG = """\
SchemaVersion: '1.0'
SageMaker:
  PythonSDK:
    Modules:
      TelemetryOptOut: true
"""
_lock = threading.RLock()


def create_training_job(client: Any, region: str, request: Mapping[str, Any]) -> None:
    """`TrainingJob.create` with exactly *request*, by *client*. Raises what the SDK and botocore raise."""
    import boto3

    class OneClient(boto3.Session):  # type: ignore[misc]
        """The SDK makes its clients from a session; it gets the one with the cluster's settings."""

        def client(self, *_: Any, **__: Any) -> Any:
            return client

    seen: dict[str, Any] = {}

    def exactly(**_: Any) -> dict[str, Any]:
        # The SDK's way from its own objects to the API's loses what is false or zero, and respells keys of mappings.
        return dict(request)

    def after(http_response: Any, **_: Any) -> None:
        seen["status"] = http_response.status_code

    events = client.meta.events
    events.register_first("provide-client-params.sagemaker.CreateTrainingJob", exactly, "orc-before")
    events.register("after-call.sagemaker.CreateTrainingJob", after, "orc-after")
    try:
        with quiet():
            resources, transform = _resources()
            resources.TrainingJob.create(
                session=OneClient(region_name=region),
                region=region,
                **transform(dict(request), "CreateTrainingJobRequest"),
            )
    except Exception:
        # The SDK describes the new job; that this fails does not unmake it.
        if seen.get("status") != 200:
            raise
    finally:
        events.unregister("provide-client-params.sagemaker.CreateTrainingJob", exactly, "orc-before")
        events.unregister("after-call.sagemaker.CreateTrainingJob", after, "orc-after")


def stock_image(image: Image, where: str) -> str:
    """The URI of a stock image, from the tables of the SDK that is installed. Raises `BackendError`."""
    framework, version, base = "pytorch", image.pytorch, None
    if image.transformers:
        framework, version = "huggingface", image.transformers
        base = f"pytorch{image.pytorch}" if image.pytorch else None
    with quiet():
        image_uris = _module("sagemaker.core.image_uris")
        try:
            return str(
                image_uris.retrieve(
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


@contextmanager
def quiet() -> Iterator[None]:
    """The SDK with its telemetry off, without configuration files, and without remarks about them."""
    with _lock, tempfile.NamedTemporaryFile("w", prefix="orc-sagemaker-", suffix=".yaml") as file:
        file.write(_CONFIG)
        file.flush()
        before = {name: os.environ.get(name) for name in _CONFIG_VARIABLES}
        loggers = [logging.getLogger(name) for name in ("sagemaker", "sagemaker.config", "sagemaker.core")]
        levels = [logger.level for logger in loggers]
        os.environ.update(dict.fromkeys(_CONFIG_VARIABLES, file.name))
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _resources() -> tuple[Any, Any]:
    return _module("sagemaker.core.resources"), _module("sagemaker.core.utils.code_injection.codec").transform


def _module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing(error) from None


def missing(error: ModuleNotFoundError) -> BackendError:
    """What to do about a package that is not installed."""
    return BackendError(
        f"clusters of kind sagemaker need the package {error.name or 'sagemaker'}, version 3 of the SDK",
        hint="Install it: pip install 'orc-launch[aws]'",
    )
