"""Libraries that train in torch's place: what of each is known before any of it is loaded.

A library is a folder of `orc.runtime.engine` with an attribute ``LIBRARY``, or an entry point of the group
``orc.engines`` of any other package, which names such an object. Nothing outside its folder names one. Entry points are
read when an argument of `Accelerator` is of none of ours: most runs never pay for them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from orc.runtime.core.errors import LaunchError, SettingConflict
from orc.runtime.core.parsing import switched_on

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext
    from orc.runtime.core.options import Options

_FOLDERS = "orc.runtime.engine"
_GROUP = "orc.engines"


@dataclass(frozen=True)
class Way:
    """Way to train, and what asks for it.

    Attributes:
        arguments: those of `Accelerator`.
        variable: that of the environment; none where it is empty.
    """

    arguments: tuple[str, ...]
    variable: str = ""

    def asked(self, given: Mapping[str, Any], env: Mapping[str, str]) -> str | None:
        """Return what asks for it, an argument in *given* or the variable in *env*; `None` where nothing does."""
        name = next((name for name in self.arguments if given.get(name) is not None), None)
        if name is not None:
            return f"Accelerator({name}=...)"
        return f"{self.variable}={env[self.variable]}" if switched_on(env, self.variable) else None


class Library(Way):
    """Library that trains in torch's place; those of the contract derive from it.

    Attributes:
        takes_layout: it trains models that a `ParallelismConfig` spreads.
        instead: end of the message that refuses another way beside it.
    """

    takes_layout: bool = False
    instead: str = ""

    def use(
        self, ctx: RunContext, given: Mapping[str, Any], options: Options, mixed_precision: str | None
    ) -> str | None:
        """Let the library train in *ctx* (`RunContext.use_library`), as an argument in *given* or the environment asks.

        It is called for every Accelerator that asks, whose own *options* and *mixed_precision* are. Nothing is
        allocated before.

        Returns:
            The precision to ask for: *mixed_precision*, or what settings of the library say.

        Raises:
            ValueError: settings that cannot be used, or contradict each other.
            ContextError: the run does not go with it, or an earlier Accelerator of this process chose otherwise; the
                same on every rank.
        """
        raise NotImplementedError

    def engine(self) -> type[Any]:
        """Return the class of its engine, which keeps the contract in `orc.runtime.train.engine`."""
        raise NotImplementedError

    def inside(self, model: nn.Module) -> nn.Module | None:
        """Return the ``module`` inside *model*, which has one, if this library made that; it is not loaded for it."""
        return None

    def problem(self, files: Collection[str]) -> str | None:
        """Return why torch cannot load a checkpoint with *files*, if this library wrote it."""
        return None


_SHARDING = Way(("fsdp_plugin",), "ACCELERATE_USE_FSDP")
_LAYOUT = Way(("parallelism_config",), "ACCELERATE_USE_PARALLELISM_CONFIG")


@cache
def libraries() -> dict[str, Library]:
    """Return the libraries that this installation has an engine for, by name; those of other packages once named."""
    folders = importlib.import_module(_FOLDERS)
    names = [module.name for module in pkgutil.iter_modules(folders.__path__) if module.ispkg]
    return {name: importlib.import_module(f"{_FOLDERS}.{name}").LIBRARY for name in names}


def inside(model: nn.Module) -> nn.Module | None:
    """Return the module inside *model*, if a library made that; only a model with an attribute ``module`` has one."""
    if "module" not in model._modules:
        return None
    return next((inner for library in libraries().values() if (inner := library.inside(model)) is not None), None)


def take_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take those of *arguments* out that ask for a library of another package, and return them.

    Raises:
        LaunchError: the engine of such a package cannot be loaded, or has no attribute that makes it one.
    """
    if not arguments:
        return {}
    import importlib.metadata

    for entry in importlib.metadata.entry_points(group=_GROUP):
        if entry.name in libraries():
            continue
        try:
            library = entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            raise LaunchError(
                f"the engine {entry.name} of the package {package} cannot be loaded: {type(error).__name__}: {error}; "
                f"update or remove {package}"
            ) from error
        libraries()[entry.name] = library
    known = {name for library in libraries().values() for name in library.arguments}
    return {name: arguments.pop(name) for name in known & arguments.keys()}


def chosen(given: Mapping[str, Any], env: Mapping[str, str]) -> Library | None:
    """Return the library that arguments of `Accelerator` in *given*, or else *env*, ask for.

    Raises:
        SettingConflict: they ask for another way to train beside it.
        ValueError: a variable is no truth value.
    """
    asked = {way: text for way in libraries().values() if (text := way.asked(given, env)) is not None}
    if not asked:
        return None
    library, mine = next(iter(asked.items()))
    rivals = [way.asked(given, env) for way in (*asked, _SHARDING, *(() if library.takes_layout else (_LAYOUT,)))]
    for rival in rivals:
        if rival not in (None, mine):
            raise SettingConflict(
                f"{rival} and {mine} ask for two ways to train one model; choose one{library.instead}"
            )
    return library
