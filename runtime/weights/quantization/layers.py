"""Selection of the layers of a model that are quantized, and the size of its weights then."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence

import torch
from torch import nn

from orc.runtime.memory.device_map import find_tied_parameters
from orc.runtime.weights.quantization.config import QuantizationConfig
from orc.runtime.weights.quantization.scheme import Scheme

logger = logging.getLogger(__name__)


def layers_to_quantize(model: nn.Module, config: QuantizationConfig, scheme: Scheme) -> list[str]:
    """Return the names of the linear layers of *model* that *config* quantizes.

    Linear layers of a class of their own are none of them: who derives from one may use its weight in other ways.

    Raises:
        ValueError: layers that cannot be quantized; all of them are listed.
    """
    kept = output_layers(model) if config.skip_modules is None else list(config.skip_modules)
    in_fp32 = list(config.keep_in_fp32_modules or ())
    _warn_of_unknown(model, [*(config.skip_modules or ()), *in_fp32])
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    chosen = [name for name in linear if not named_by(name, kept) and not named_by(name, in_fp32)]
    problems = [f"{name}: {why}" for name in chosen if (why := scheme.problem(linear[name]))]
    if problems:
        raise ValueError(
            f"{len(problems)} layers cannot be quantized: {'; '.join(problems[:20])}. Name them in skip_modules"
        )
    if not chosen:
        logger.warning("nothing is quantized: the model has no linear layers, or all of them are skipped")
    return chosen


def named_by(name: str, modules: Sequence[str]) -> bool:
    """Return whether one of *modules* is the module *name*, one around it, or their last parts (``"lm_head"``)."""
    return any(f".{module}." in f".{name}." for module in modules)


def output_layers(model: nn.Module) -> list[str]:
    """Return the names of the modules that stay as they are by default: the last one, and those that share a weight."""
    tied = [name for group in find_tied_parameters(model) for name in group]
    last = [name for name, _ in model.named_parameters()][-1:]
    named = getattr(model, "get_output_embeddings", None)  # models of Transformers say it
    output = named() if callable(named) else None
    outputs = {name.rpartition(".")[0] for name in (*tied, *last)}
    return sorted(outputs | {name for name, module in model.named_modules() if output is not None and module is output})


def special_dtypes(
    model: nn.Module, layers: Sequence[str], config: QuantizationConfig, scheme: Scheme
) -> dict[str, torch.dtype | str]:
    """Return the data types, by name, of the weights of *model* that will not have `torch_dtype`."""
    dtypes: dict[str, torch.dtype | str] = {f"{layer}.weight": scheme.size_dtype for layer in layers}
    in_fp32 = list(config.keep_in_fp32_modules or ())
    for name, value in model.named_parameters():
        if value.is_floating_point() and named_by(name, in_fp32):
            dtypes[name] = torch.float32
    return dtypes


def _warn_of_unknown(model: nn.Module, names: Sequence[str]) -> None:
    modules = [name for name, _ in model.named_modules() if name]
    for name in names:
        if not any(named_by(module, [name]) for module in modules):
            near = difflib.get_close_matches(name, [*modules, *(module.rpartition(".")[2] for module in modules)], n=1)
            hint = f"; is it {near[0]}?" if near else ""
            logger.warning("the model has no module %s, which is not to be quantized%s", name, hint)
