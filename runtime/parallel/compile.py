"""``torch.compile`` for prepared models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from orc.runtime.core.enums import DynamoBackend
from orc.runtime.core.handlers import TorchDynamoPlugin

if TYPE_CHECKING:
    from orc.runtime.core.config import RuntimeConfig


def resolve_plugin(plugin: TorchDynamoPlugin, config: RuntimeConfig) -> TorchDynamoPlugin:
    """*plugin* with what it leaves open taken from the environment.

    Raises:
        ValueError: the environment names a back end that there is not.
    """
    around: dict[str, Any] = {
        "backend": config.dynamo_backend,
        "mode": config.dynamo_mode,
        "fullgraph": config.dynamo_use_fullgraph,
        "dynamic": config.dynamo_use_dynamic,
    }
    return replace(plugin, **{name: value for name, value in around.items() if getattr(plugin, name) is None})


def compiles(plugin: TorchDynamoPlugin) -> bool:
    """Return whether *plugin* (resolved) turns on compilation."""
    return plugin.backend not in (None, DynamoBackend.NO) and not plugin.disable


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """*model* compiled as *plugin* sets; one that is compiled already comes back as it is."""
    if is_compiled(model) or not compiles(plugin):
        return model
    if plugin.use_regional_compilation and repeated_blocks(model):
        return compile_regions(model, **plugin.to_kwargs())
    return cast(nn.Module, torch.compile(model, **plugin.to_kwargs()))


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of *module* in place, or all of it where there are none, and return it.

    The compiler meets each kind of block once, so that a deep model compiles as fast as one of its blocks.

    Args:
        module: a model, such as one with a ``ModuleList`` of blocks of one class.
        compile_kwargs: of `torch.compile`.

    Returns:
        *module* itself.
    """
    for block in repeated_blocks(module) or [module]:
        if block._compiled_call_impl is None:
            block.compile(**compile_kwargs)
    return module


def is_compiled(model: nn.Module) -> bool:
    """Return whether *model* is the result of ``torch.compile(module)``."""
    from torch._dynamo.eval_frame import OptimizedModule  # no public name

    return isinstance(model, OptimizedModule)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of every ``ModuleList`` in *model* that holds several of one class, outermost lists only."""
    if isinstance(model, nn.ModuleList) and len(model) > 1 and len({type(block) for block in model}) == 1:
        return list(model)
    return [block for child in model.children() for block in repeated_blocks(child)]
