"""Detection of the launch environment: one module per platform, each reading its own variables. Torch-free.

A new platform is a module here with ``NAME``, ``present`` and ``read``, and its place in the order below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from orc.runtime.core.environment import JobFacts, LaunchEnvironment, Platform
from orc.runtime.launch.environment import hydra, openmpi, orc, single, slurm, torchrun

# The innermost launcher wins: torchrun inside an srun step sets RANK, and those ranks are the ones that train.
PLATFORMS: tuple[Platform, ...] = cast("tuple[Platform, ...]", (orc, torchrun, openmpi, hydra, slurm, single))


def detect(env: Mapping[str, str]) -> LaunchEnvironment:
    """The launch environment that *env* describes. Raises `LaunchError` when it is contradictory."""
    platform = next(p for p in PLATFORMS if p.present(env))
    return replace(platform.read(env), job=orc.job_facts(env))


__all__ = ["PLATFORMS", "JobFacts", "LaunchEnvironment", "Platform", "detect"]
