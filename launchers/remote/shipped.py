"""How a program that came over a line runs: its modules are made when they are imported, nothing is installed.

Travels in front of each program (`programs`): standard library alone, Python 3.9.
"""

from __future__ import annotations

import marshal
import sys
import zlib
from _frozen_importlib import ModuleSpec  # what importlib gives out, without the milliseconds that it costs
from _frozen_importlib_external import MAGIC_NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType
    from typing import Any

# Equal where byte code is.
CODE = f"{sys.implementation.cache_tag} {MAGIC_NUMBER.hex()}"


class Shipped:
    """Finds the modules of one program: name -> source or byte code, `None` for a package."""

    def __init__(self, modules: Mapping[str, str | bytes | None]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if name not in self._modules:
            return None
        return ModuleSpec(name, self, is_package=self._modules[name] is None)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        """See `importlib.abc.Loader`."""

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        text = self._modules[module.__name__]
        if text is not None:
            code = marshal.loads(text) if isinstance(text, bytes) else compile(text, f"<{module.__name__}>", "exec")
            exec(code, module.__dict__)


def run(packed: bytes, arguments: Sequence[str]) -> None:
    """Run the function ``main`` of a program's first module. What another program has imported of ours is forgotten."""
    first, modules = marshal.loads(zlib.decompress(packed))
    for name in [name for name in sys.modules if name.partition(".")[0] == "orc"]:
        del sys.modules[name]
    sys.meta_path[:] = [Shipped(modules), *(f for f in sys.meta_path if type(f).__name__ != Shipped.__name__)]
    sys.argv = ["orc", *arguments]
    __import__(first)
    sys.modules[first].main()
