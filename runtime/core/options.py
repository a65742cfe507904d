"""Arguments of `Accelerator(...)`, checked and put in one place. Pure; torch-free."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from orc.runtime.core.enums import RNGType
from orc.runtime.core.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from orc.runtime.core.parsing import nearest

if TYPE_CHECKING:
    from orc.runtime.core.parallelism import ParallelismConfig

# Spellings of older releases, and where their value goes now.
_OLDER = {
    "step_with_optimizer": "step_scheduler_with_optimizer",
    "even_batches": "DataLoaderConfiguration(even_batches=...)",
    "dispatch_batches": "DataLoaderConfiguration(dispatch_batches=...)",
    "use_seedable_sampler": "DataLoaderConfiguration(use_seedable_sampler=...)",
}

H = TypeVar("H", bound=KwargsHandler)


class Unsaid(int):
    """A default that is distinct from the same number given by the script."""


ONE_STEP = Unsaid(1)


@dataclass(repr=False, eq=False)
class Options:
    """The checked arguments of one Accelerator. What most runs never look at is made when it is looked at."""

    device_placement: bool
    step_scheduler_with_optimizer: bool
    dataloader: DataLoaderConfiguration
    project: ProjectConfiguration
    accumulation: GradientAccumulationPlugin | None  # None: the variables decide, or the defaults
    rng_types: tuple[str, ...]
    scaler: GradScalerKwargs
    process_group: InitProcessGroupKwargs
    dynamo: TorchDynamoPlugin
    handlers: dict[type[KwargsHandler], KwargsHandler]  # those that were given, and those that were looked at
    recipe: KwargsHandler | None = None  # options of the precision
    fsdp_plugin: Any = None
    parallelism: ParallelismConfig | None = None

    @property
    def autocast(self) -> AutocastKwargs:
        """Options of autocast."""
        return _take(self.handlers, AutocastKwargs)

    @property
    def ddp(self) -> DistributedDataParallelKwargs:
        """Options of data-parallel training."""
        return _take(self.handlers, DistributedDataParallelKwargs)

    @property
    def profile(self) -> ProfileKwargs:
        """Options of the profiler."""
        return _take(self.handlers, ProfileKwargs)


def gather_options(
    *,
    device_placement: bool,
    split_batches: bool | None,
    gradient_accumulation_steps: int,
    dataloader_config: DataLoaderConfiguration | None,
    fsdp_plugin: Any,
    parallelism: ParallelismConfig | None,
    rng_types: Iterable[str] | None,
    project_dir: str | os.PathLike[str] | None,
    project_config: ProjectConfiguration | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    step_scheduler_with_optimizer: bool,
    kwargs_handlers: Iterable[KwargsHandler] | None,
    dynamo_backend: str | None,
    dynamo_plugin: TorchDynamoPlugin | None,
    more: Mapping[str, Any],
    accelerator: Callable[..., Any],
) -> Options:
    """Check all options and resolve those that can be given twice.

    *more* holds spellings of older releases, beside the arguments that *accelerator* has now.

    Raises:
        TypeError: an unknown argument or a handler of the wrong type.
        ValueError: arguments that contradict each other.
    """
    older = _older_arguments(more, accelerator)
    if "step_with_optimizer" in older:
        step_scheduler_with_optimizer = older.pop("step_with_optimizer")
    if split_batches is not None:
        older["split_batches"] = split_batches
    # A copy: the Accelerator's settings can be changed, the object may serve for another one.
    loader = dataclasses.replace(dataloader_config) if dataloader_config is not None else DataLoaderConfiguration()
    for name, value in older.items():
        if dataloader_config is not None and getattr(dataloader_config, name) != value:
            raise ValueError(f"{name} is given twice: as {value!r}, and in dataloader_config as "
                             f"{getattr(dataloader_config, name)!r}; keep the latter")  # fmt: skip
        loader = dataclasses.replace(loader, **{name: value})
    handlers = _by_type(kwargs_handlers or ())
    recipe = _recipe(handlers)
    return Options(
        device_placement=device_placement,
        step_scheduler_with_optimizer=step_scheduler_with_optimizer,
        dataloader=loader,
        project=_project(project_dir, project_config),
        accumulation=_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin, handlers),
        rng_types=_rng_types(rng_types),
        scaler=_take(handlers, GradScalerKwargs),
        process_group=_take(handlers, InitProcessGroupKwargs),
        dynamo=_dynamo(dynamo_backend, dynamo_plugin, handlers),
        handlers=handlers,
        recipe=recipe,
        fsdp_plugin=fsdp_plugin,
        parallelism=parallelism,
    )


def _older_arguments(more: Mapping[str, Any], accelerator: Callable[..., Any]) -> dict[str, Any]:
    older = {}
    for name, value in more.items():
        if name in _OLDER:
            warnings.warn(f"Accelerator({name}=...) is the older spelling of {_OLDER[name]}", FutureWarning, 4)
            older[name] = value
        else:
            raise TypeError(f"Accelerator() has no argument {name!r}{nearest(name, signature(accelerator).parameters)}")
    return older


def _by_type(handlers: Iterable[KwargsHandler]) -> dict[type[KwargsHandler], KwargsHandler]:
    by_type: dict[type[KwargsHandler], KwargsHandler] = {}
    for handler in handlers:
        kind = next((kind for kind in _known() if isinstance(handler, kind)), None)
        if kind is None:
            names = ", ".join(kind.__name__ for kind in _known())
            raise TypeError(f"kwargs_handlers: {handler!r} is not one of {names}")
        if kind in by_type:
            raise ValueError(f"kwargs_handlers: {kind.__name__} is given twice")
        by_type[kind] = handler
    return by_type


def _known() -> tuple[type[KwargsHandler], ...]:
    from orc.runtime.core.fp8_recipes import RECIPES, FP8RecipeKwargs

    of_models = (AutocastKwargs, DistributedDataParallelKwargs)
    of_run = (GradScalerKwargs, InitProcessGroupKwargs, GradientAccumulationPlugin, TorchDynamoPlugin, ProfileKwargs)
    return *of_models, *of_run, *RECIPES.values(), FP8RecipeKwargs


def _take(handlers: dict[type[KwargsHandler], KwargsHandler], kind: type[H]) -> H:
    handler = handlers.get(kind)
    if not isinstance(handler, kind):
        handler = handlers[kind] = kind()
    return handler


def _recipe(handlers: Mapping[type[KwargsHandler], KwargsHandler]) -> KwargsHandler | None:
    if not handlers:
        return None
    from orc.runtime.core.fp8_recipes import FP8Recipe

    given = [handlers[kind] for kind in _known() if kind in handlers and issubclass(kind, FP8Recipe)]
    if len(given) > 1:
        names = " and ".join(type(recipe).__name__ for recipe in given)
        raise ValueError(f"kwargs_handlers: {names} choose different back ends of fp8; give one of them")
    return given[0] if given else None


def _accumulation(
    steps: int, plugin: GradientAccumulationPlugin | None, handlers: Mapping[type[KwargsHandler], KwargsHandler]
) -> GradientAccumulationPlugin | None:
    said = None if isinstance(steps, Unsaid) else steps
    handler = handlers.get(GradientAccumulationPlugin)
    given = [candidate for candidate in (plugin, handler) if isinstance(candidate, GradientAccumulationPlugin)]
    if len(given) > 1:
        raise ValueError("GradientAccumulationPlugin is given twice: in gradient_accumulation_plugin and among the "
                         "kwargs_handlers")  # fmt: skip
    if not given:
        return None if said is None else GradientAccumulationPlugin(num_steps=said)
    if given[0].num_steps is None:
        return dataclasses.replace(given[0], num_steps=said)
    if said is not None and said not in (1, given[0].num_steps):
        raise ValueError(
            f"gradient_accumulation_steps={steps} contradicts GradientAccumulationPlugin(num_steps="
            f"{given[0].num_steps}); give one of them"
        )
    return given[0]


def _dynamo(
    backend: str | None, plugin: TorchDynamoPlugin | None, handlers: Mapping[type[KwargsHandler], KwargsHandler]
) -> TorchDynamoPlugin:
    given = [
        candidate for candidate in (plugin, handlers.get(TorchDynamoPlugin)) if isinstance(candidate, TorchDynamoPlugin)
    ]
    if len(given) + (backend is not None) > 1:
        raise ValueError("torch.compile is configured twice: give one of dynamo_backend, dynamo_plugin and a "
                         "TorchDynamoPlugin among the kwargs_handlers")  # fmt: skip
    return given[0] if given else TorchDynamoPlugin(backend=backend)


def _project(directory: str | os.PathLike[str] | None, project: ProjectConfiguration | None) -> ProjectConfiguration:
    if project is None:
        return ProjectConfiguration(project_dir=directory)
    if directory is not None and project.project_dir is None:
        project.set_directories(directory)
    return project


def _rng_types(rng_types: Iterable[str] | None) -> tuple[str, ...]:
    if rng_types is None:
        return (RNGType.GENERATOR,)
    try:
        return tuple(RNGType(kind) for kind in rng_types)
    except ValueError as error:
        raise ValueError(f"rng_types: {error}; choose from {', '.join(RNGType)}") from None
