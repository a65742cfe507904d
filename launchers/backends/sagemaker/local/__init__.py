"""Training jobs on this machine under SageMaker's container contract, without a call of AWS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.backends.sagemaker.local.service import Mode
    from orc.launchers.backends.sagemaker.service import Service


def open_local_service(mode: Mode, state_dir: Path) -> Service:
    """Return the service of this machine, with containers made of namespaces (``contract``) or by ``docker``."""
    from orc.launchers.backends.sagemaker.local.service import LocalService

    return LocalService(_directory(state_dir), mode)


def place_of(uri: str, state_dir: Path) -> Path:
    """Return the place of an object of S3 while this machine stands in for AWS."""
    from orc.launchers.backends.sagemaker.local.service import LocalService

    return LocalService(_directory(state_dir)).storage.path(uri)


def _directory(state_dir: Path) -> Path:
    return state_dir / "sagemaker"
