"""`StandInFinder`: makes ``import accelerate`` and its metadata come from the table of names. Standard library only.

First on ``sys.meta_path``, so that a package of that name that is installed is not reached; nothing of it is touched.
Cheap: until the first such import, nothing but this file is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from orc.runtime.stand_ins.package import PACKAGE

TRAINER = "transformers.trainer"  # which saves and resumes by itself: see `orc.runtime.stand_ins.trainer`


class StandInFinder:
    """Finder of the modules that stand in, and of the distribution that they claim to be from."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table; `None` for any other."""
        if name == TRAINER:
            return self._equipped(name, path, target)
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        from orc.runtime.stand_ins import names

        if name not in names.MODULES:
            return None
        spec = ModuleSpec(name, self, origin=names.__file__, is_package=name in names.PACKAGES)  # type: ignore[arg-type]
        spec.has_location = True  # which gives the module a __file__
        return spec

    def _equipped(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Return the spec that the other finders give, followed by `equip` once the module is executed."""
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)
        loader: Any = spec and spec.loader
        if loader is None or "exec_module" in vars(loader):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from orc.runtime.stand_ins.trainer import equip

            equip(module)

        loader.exec_module = exec_module
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, whose names are looked up when they are requested."""
        from orc.runtime.stand_ins.module import StandInModule

        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed."""

    def get_code(self, name: str) -> None:
        """Raise `ImportError`: ``python -m`` requests this, and no module that stands in is a program."""
        raise ImportError(
            f"{name} is no program: orc.runtime stands in for {PACKAGE}; `orc launch` starts ranks", name=name
        )

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """Yield the distribution for ``importlib.metadata`` where *context* names it, or names none."""
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower() == PACKAGE:
            from orc.runtime.stand_ins.distribution import StandInDistribution

            yield StandInDistribution()

    def invalidate_caches(self) -> None:
        """There are none."""


def install() -> None:
    """Put the finder before the others, once.

    Raises:
        ImportError: the real package is imported already; what was taken from it would stay.
    """
    if any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        return
    real = sys.modules.get(PACKAGE)
    if real is not None:
        raise ImportError(
            f"{PACKAGE} is already imported, from {getattr(real, '__file__', None)}: ask for the stand-in before the "
            f"first import of it or of a library that uses it, or start with `orc launch --stand-in {PACKAGE}`",
            name=PACKAGE,
        )
    sys.meta_path.insert(0, StandInFinder())
