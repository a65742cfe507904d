"""Comparing versions of installed packages."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Return whether ``library_or_version operation requirement_version`` holds, by the ordering of PEP 440.

    A local label (the ``+cpu`` of ``2.13.0+cpu``) counts only where the requirement has one too.

    Args:
        library_or_version: the name of an installed distribution, or a version.
        operation: ``>``, ``>=``, ``==``, ``!=``, ``<=`` or ``<``.
        requirement_version: the version to compare with.

    Raises:
        ValueError: another operation, or something that is no version.
        importlib.metadata.PackageNotFoundError: there is no such distribution.

    Example:
        >>> compare_versions("0.9.1", ">=", "0.10")
        False
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"`operation` must be one of {list(_OPERATIONS)}, received {operation}")
    required = str(requirement_version)
    version = str(library_or_version)
    if not _is_version(version):
        import importlib.metadata

        version = importlib.metadata.version(version)
    if "+" not in required:
        version = version.partition("+")[0]
    return _OPERATIONS[operation](_parse(version), _parse(required))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the torch of this process satisfies ``operation version``: ``is_torch_version(">=", "2.4")``."""
    import torch

    return compare_versions(str(torch.__version__), operation, version)


def _is_version(text: str) -> bool:
    return re.match(r"v?\d", text.strip()) is not None


@cache
def _parse(text: str) -> Any:
    # torch brings a full implementation of PEP 440 along; what it cannot read it would compare as text.
    from torch.torch_version import TorchVersion

    if not _is_version(text) or not re.fullmatch(r"[\w.!+-]+", text.strip()):
        raise ValueError(f"{text!r} is no version")
    return TorchVersion(text.strip())
