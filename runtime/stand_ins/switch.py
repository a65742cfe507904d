"""`stand_in`: has this process, and those it starts, take the runtime for another package."""

from __future__ import annotations

import os

from orc.runtime.core.config import KEYS, check
from orc.runtime.stand_ins.finder import install


def stand_in(*packages: str) -> None:
    """Make ``import accelerate`` give `orc.runtime`, in this process and in the ranks and workers that it starts.

    Call it before the first import of the package, and of libraries that import it (Transformers, trl, peft,
    diffusers). The real package, where it is installed, is not touched. ``orc launch --stand-in accelerate`` and
    ``runtime: {stand_in: [accelerate]}`` in a job file do the same without a line in the script.

    Args:
        packages: what to stand in for: ``accelerate``.

    Raises:
        ConfigError: there is no stand-in for one of *packages*; says the nearest name.
        ImportError: the real package is imported already.

    Example:
        >>> import orc.runtime
        >>> orc.runtime.stand_in("accelerate")
        >>> import accelerate
        >>> accelerate.Accelerator is orc.runtime.Accelerator
        True
    """
    value = check("stand_in", packages)
    install()
    os.environ[KEYS["stand_in"].variable] = value


def stand_in_from_environment() -> None:
    """Install what ``ORC_STAND_IN`` names; raises as `stand_in` does. Without the variable nothing happens."""
    variable = KEYS["stand_in"].variable
    if os.environ.get(variable):
        stand_in(*os.environ[variable].split(","))
