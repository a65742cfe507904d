"""Single process without a launcher: ``python train.py``."""

from __future__ import annotations

from collections.abc import Mapping

from orc.runtime.core.environment import LaunchEnvironment

NAME = "single"


def present(env: Mapping[str, str]) -> bool:
    """Always: this is what remains when no platform claims the process."""
    return True


def read(env: Mapping[str, str]) -> LaunchEnvironment:
    """A world of one."""
    return LaunchEnvironment(NAME)
