"""torchao: linear layers whose three products are computed in float8, with scaling factors of the moment."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from orc.runtime.core.fp8_recipes import AORecipeKwargs
from orc.runtime.parallel.precision.fp8 import FP8

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.parallel.base import Request

Filter = Callable[[nn.Module, str], bool]


def linear_filter(model: nn.Module) -> Filter:
    """Return the default filter of *model*: which of its modules compute in float8.

    Those are plain linear layers whose sizes are multiples of 16, as the products of GPUs need them. The first and the
    last stay as they are, where less precision costs most.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ends = {names[0], names[-1]} if names else set()

    def chosen(module: nn.Module, name: str) -> bool:
        # Layers of a subclass compute something else, or are never called themselves (that of MultiheadAttention).
        return (
            type(module) is nn.Linear
            and name not in ends
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )

    return chosen


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Filter | None = None
) -> nn.Module:
    """Replace linear layers of *model*, in place, by torchao's for training in float8.

    Args:
        model: the model; its parameters stay, unless *config* has ``enable_fsdp_float8_all_gather``.
        config: a ``torchao.float8.Float8LinearConfig``.
        module_filter_func: called with a module and its name, says whether to replace it; see `AORecipeKwargs`.

    Returns:
        *model*; a new layer where the model is a linear layer itself.
    """
    from torchao.float8 import convert_to_float8_training

    converted: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=module_filter_func or linear_filter(model)
    )
    return converted


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether *model* has layers that compute in float8 by torchao."""
    library = sys.modules.get("torchao.float8.float8_linear")  # where it is not loaded there are none
    return library is not None and any(isinstance(module, library.Float8Linear) for module in model.modules())


@cache  # once in a process
def _warn_of_emulation() -> None:
    warnings.warn(
        "mixed_precision=fp8 on a CPU: torchao emulates float8, with its rounding and without its speed; for tests",
        stacklevel=2,
    )


class AO(FP8):
    """torchao's float8 training; on a CPU in emulation."""

    backend = "AO"
    with_library = True
    recipe: AORecipeKwargs

    def requires(self, ctx: RunContext) -> str | None:
        """A GPU with fp8, or a CPU, which emulates it."""
        try:
            import torchao.float8  # noqa: F401
        except ImportError as error:
            return f"this torchao does not train in float8: {error}"
        if self._emulates(ctx):
            _warn_of_emulation()
            return None
        return super().requires(ctx)

    def has_layers(self, model: nn.Module) -> bool:
        """Return whether *model* has layers of torchao's."""
        return has_ao_layers(model)

    def replaced(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model* with the layers that pass the filter replaced.

        Raises:
            ValueError: shards are to be gathered in float8 and cannot be.
        """
        wanted = self.recipe.module_filter_func or linear_filter(model)
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        names = {name for name, module in linear.items() if wanted(module, name)}
        if not names:
            warnings.warn(
                "mixed_precision=fp8: no layer of the model computes in fp8; linear layers do whose sizes are "
                "multiples of 16, except the first and the last (AORecipeKwargs(module_filter_func=...) says others)",
                stacklevel=2,
            )
            return model
        config = self._config(ctx)
        if config.enable_fsdp_float8_all_gather:
            _check_gathering(model, names, request)
        return convert_model_to_fp8_ao(model, config, lambda module, name: name in names)

    def _emulates(self, ctx: RunContext) -> bool:
        return ctx.device.type == "cpu" or bool(getattr(self.recipe.config, "emulate", False))

    def _config(self, ctx: RunContext) -> Any:
        from torchao.float8 import Float8LinearConfig

        config = self.recipe.config or Float8LinearConfig(
            pad_inner_dim=bool(self.recipe.pad_inner_dim),
            enable_fsdp_float8_all_gather=bool(self.recipe.enable_fsdp_float8_all_gather),
        )
        return dataclasses.replace(config, emulate=True) if self._emulates(ctx) and not config.emulate else config


def _check_gathering(model: nn.Module, names: set[str], request: Request) -> None:
    plugin = request.options.get("fsdp")
    if plugin is None or plugin.fsdp_version != 2:
        raise ValueError(
            "enable_fsdp_float8_all_gather needs shards of version 2 of FSDP: "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    parts: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts.setdefault(id(parameter), []).append(name)
    for name in sorted(names):
        shared = parts[id(model.get_submodule(name).weight)]
        if len(shared) > 1:
            raise ValueError(
                f"enable_fsdp_float8_all_gather: {' and '.join(shared)} are one tensor, which can only be gathered in "
                "one form: leave that layer out with module_filter_func"
            )


BACKEND = AO
