"""The documented helper functions under their documented path: ``from orc.runtime.utils import set_seed``.

Re-exports only: every name of `orc.runtime`, from the module that is named by what it does. No logic lives here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import orc.runtime
from orc.runtime import __all__ as __all__

if TYPE_CHECKING:
    from orc.runtime import *  # noqa: F403

_DOCUMENTED_MODULES = ("deepspeed", "environment", "operations")


def __getattr__(name: str) -> Any:
    if name in _DOCUMENTED_MODULES:  # as in `orc.runtime`: no second import is needed
        return importlib.import_module(f"{__name__}.{name}")
    if name not in orc.runtime.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(orc.runtime, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
