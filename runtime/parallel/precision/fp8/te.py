"""Transformer Engine: its linear layers and layer norms, and its autocast around the model's forward.

It computes on NVIDIA GPUs only. The tests run against a double of its documented functions.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orc.runtime.core import fp8_settings
from orc.runtime.core.fp8_recipes import FP8RecipeKwargs, TERecipeKwargs
from orc.runtime.parallel.precision.forward import WrappedForward
from orc.runtime.parallel.precision.fp8 import FP8

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.handlers import AutocastKwargs
    from orc.runtime.parallel.base import Request


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace the linear layers and layer norms inside *model*, in place, by Transformer Engine's.

    Layers stay whose weight is shared with another module, and linear ones whose sizes are no multiples of 16.

    Args:
        model: the model.
        to_transformer_engine: the other way round, if false.
        _convert_linear: linear layers too.
        _convert_ln: layer norms too.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    import transformer_engine.pytorch as te

    shared = _shared_weights(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(getattr(child, "weight", None)) in shared:
                continue
            made = _layer_of(te, child) if to_transformer_engine else _layer_of_torch(te, child)
            wanted = _convert_ln if isinstance(child, (nn.LayerNorm, te.LayerNorm)) else _convert_linear
            if made is not None and wanted:
                setattr(parent, name, _filled(made(), child))


def _layer_of(te: Any, child: Any) -> Callable[[], Any] | None:
    """Return what makes the layer of Transformer Engine in the place of *child*; `None` where there is none."""
    if type(child) is nn.Linear and child.in_features % 16 == 0 and child.out_features % 16 == 0:
        bias = child.bias is not None
        return lambda: te.Linear(child.in_features, child.out_features, bias=bias, **_place(child, "params_dtype"))
    plain = type(child) is nn.LayerNorm and child.elementwise_affine and child.bias is not None
    if plain and len(child.normalized_shape) == 1:
        return lambda: te.LayerNorm(child.normalized_shape[0], eps=child.eps, **_place(child, "params_dtype"))
    return None


def _layer_of_torch(te: Any, child: Any) -> Callable[[], Any] | None:
    """Return what makes torch's layer in the place of Transformer Engine's *child*; `None` for any other."""
    if isinstance(child, te.Linear):
        bias = child.bias is not None and child.bias.numel() > 0
        return lambda: nn.Linear(child.in_features, child.out_features, bias=bias, **_place(child, "dtype"))
    if isinstance(child, te.LayerNorm):
        return lambda: nn.LayerNorm(child.weight.shape[0], eps=child.eps, **_place(child, "dtype"))
    return None


def _shared_weights(model: nn.Module) -> set[int]:
    seen: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return {key for key, count in seen.items() if count > 1}


def _place(child: Any, key: str) -> dict[str, Any]:
    return {key: child.weight.dtype, "device": child.weight.device}


def _filled(new: nn.Module, old: Any) -> nn.Module:
    with torch.no_grad():
        for name, parameter in new.named_parameters(recurse=False):
            former = getattr(old, name)
            parameter.copy_(former)
            parameter.requires_grad_(former.requires_grad)
    return new.train(old.training)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether *model* has a linear layer or layer norm of Transformer Engine."""
    te = sys.modules.get("transformer_engine.pytorch")  # where it is not loaded there are none
    if te is None:
        return False
    kinds = (te.LayerNorm, te.Linear, te.TransformerLayer)
    return any(isinstance(module, kinds) for module in model.modules())


class FP8Forward(WrappedForward):
    """A model's forward under Transformer Engine's autocast; in evaluation without fp8, unless it is requested.

    Args:
        forward: of a model, bound to it.
        recipe: of Transformer Engine (``transformer_engine.common.recipe``).
        use_during_eval: compute in fp8 in evaluation too.
    """

    def __init__(self, forward: Callable[..., Any], recipe: Any, use_during_eval: bool = False) -> None:
        super().__init__(forward)
        self.recipe, self.use_during_eval = recipe, use_during_eval

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        from transformer_engine.pytorch import fp8_autocast

        inner: Any = self.original
        while isinstance(inner, WrappedForward):
            inner = inner.original
        model = getattr(inner, "__self__", None)
        enabled = self.use_during_eval or model is None or bool(model.training)
        with fp8_autocast(enabled=enabled, fp8_recipe=self.recipe):
            return self.original(*args, **kwargs)


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return *model_forward* under Transformer Engine's autocast.

    Args:
        model_forward: the forward of a model, bound to it.
        fp8_recipe: a recipe of Transformer Engine.
        use_during_eval: compute in fp8 in evaluation too; by default a model in evaluation mode computes without.
    """
    return FP8Forward(model_forward, fp8_recipe, use_during_eval)


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any = None) -> nn.Module:
    """Put `contextual_fp8_autocast` around the forward of *model*, in place.

    Args:
        model: a model with layers of Transformer Engine.
        fp8_recipe_handler: a `TERecipeKwargs`, or `FP8RecipeKwargs`; else the environment and the defaults.

    Returns:
        *model*.

    Raises:
        ImportError: Transformer Engine is not installed.
        ValueError: the installed one does not know an option.
    """
    if isinstance(model.forward, FP8Forward):
        return model
    umbrella = isinstance(fp8_recipe_handler, FP8RecipeKwargs)
    recipe: Any = fp8_recipe_handler.of("TE") if umbrella else fp8_recipe_handler or TERecipeKwargs()
    wrapped = contextual_fp8_autocast(model.forward, _recipe(recipe), bool(recipe.use_autocast_during_eval))
    model.forward = wrapped
    return model


def _recipe(options: TERecipeKwargs) -> Any:
    """Return Transformer Engine's recipe. What newer ones no longer have is passed on where it is not the default."""
    from transformer_engine.common import recipe

    chosen = getattr(recipe.Format, str(options.fp8_format))
    if options.use_mxfp8_block_scaling:
        kind = getattr(recipe, "MXFP8BlockScaling", None)
        if kind is None:
            raise ValueError("use_mxfp8_block_scaling: the installed Transformer Engine has no MXFP8BlockScaling")
        return kind(fp8_format=chosen)
    arguments = {
        "margin": options.margin,
        "fp8_format": chosen,
        "amax_history_len": options.amax_history_len,
        "amax_compute_algo": options.amax_compute_algo,
    }
    known = inspect.signature(recipe.DelayedScaling).parameters
    for name in ("interval", "override_linear_precision"):
        value = getattr(options, name)
        if name in known:
            arguments[name] = value
        elif value != fp8_settings.SETTINGS[name].default:
            raise ValueError(f"{name}={value!r}: the installed Transformer Engine has no such option any more")
    return recipe.DelayedScaling(**arguments)


_SCALING = "._extra_state"  # keys under which its layers keep the history of their scaling factors


def _drop_scaling(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave Transformer Engine's own entries out of *state*: checkpoints are the same in every precision."""
    for name in [name for name in state if name.endswith(_SCALING)]:
        del state[name]


def _take_without_scaling(model: nn.Module, found: Any) -> None:
    """Take a state without it: the history begins anew."""
    found.missing_keys[:] = [name for name in found.missing_keys if not name.endswith(_SCALING)]


class TE(FP8):
    """Transformer Engine."""

    backend = "TE"
    recipe: TERecipeKwargs

    def has_layers(self, model: nn.Module) -> bool:
        """Return whether *model* has layers of Transformer Engine."""
        return has_transformer_engine_layers(model)

    def replaced(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model* with layers of Transformer Engine, and the state dict that it had without them."""
        convert_model(model)
        if self.has_layers(model):
            model._register_state_dict_hook(_drop_scaling)  # the public name is newer than the oldest torch
            model.register_load_state_dict_post_hook(_take_without_scaling)
        else:
            warnings.warn(
                "mixed_precision=fp8: no layer of the model computes in fp8; linear layers do whose sizes are "
                "multiples of 16",
                stacklevel=2,
            )
        return model

    def wrap(self, model: nn.Module, device: torch.device, options: AutocastKwargs, *, compiled: bool = False) -> None:
        """Put Transformer Engine's autocast around the forward of *model*, inside that of bfloat16."""
        if self.has_layers(model):
            apply_fp8_autowrap(model, self.recipe)
        super().wrap(model, device, options, compiled=compiled)


BACKEND = TE
