"""Loading a model whose linear layers are quantized: which of them, and what their weights take."""

from __future__ import annotations

import copy
import difflib
import logging
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from orc.runtime.memory.device_map import MaxMemory, find_tied_parameters, retie_parameters
from orc.runtime.weights.alignment import Device, as_device
from orc.runtime.weights.dispatch import (
    check_plan,
    computing_device,
    dispatch_model,
    module_device,
    offloading_devices,
)
from orc.runtime.weights.load_in_model import Placement, Source, check_fit, checkpoint_weights, planned
from orc.runtime.weights.offload import return_free_memory, will_not_need
from orc.runtime.weights.quantization.config import QuantizationConfig
from orc.runtime.weights.quantization.scheme import Scheme, quantization_of

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


_TRIM = 4 << 20  # bytes of weights after which free memory goes back to the system


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: QuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Return *model* with its linear layers quantized, in evaluation mode; its weights do not learn, adapters may.

    Weights are read from a mapped file and quantized one by one: there is never more in memory than the quantized
    model and one weight. An empty model stays as it is, and can be used again; one with weights is changed in place.

    Args:
        model: an empty model (`init_empty_weights`), or one with weights.
        bnb_quantization_config: a `BnbQuantizationConfig` or a `TorchAoQuantizationConfig`.
        weights_location: a file of weights, an index of several, or their folder; weights in eight bits that
            `save_model` saved are taken as they are. A model with weights needs none.
        device_map: devices by module name, or a strategy, for inference; by default the accelerator, or the CPU where
            there is none. Layers that are offloaded stay in `torch_dtype`, unless they are in eight bits.
        no_split_module_classes: names of classes whose modules stay on one device.
        max_memory: limits by device for a strategy; what is free by default.
        offload_folder: where weights for the disk go that no file has like this.
        offload_state_dict: accepted; one weight is in memory at a time in any case.

    Raises:
        ImportError: the library that quantizes is not installed.
        CheckpointError: the checkpoint is incomplete or damaged, or is one of another model.
        ValueError: the model has no weights and there is no *weights_location*, the model is quantized already, or the
            device map does not fit the model or the machine.
    """
    config, scheme = bnb_quantization_config, bnb_quantization_config.scheme()
    known = quantization_of(model)
    if known is not None:
        raise ValueError(f"the model is quantized already: {known.label}")
    absent = [name for name, value in model.state_dict(keep_vars=True).items() if value.is_meta]
    if absent and weights_location is None:
        raise ValueError(
            f"the model has no weights ({', '.join(absent[:3])}, ...): name their file or folder in weights_location"
        )
    target = copy.deepcopy(model) if absent else model
    layers = layers_to_quantize(target, config, scheme)
    special = special_dtypes(target, layers, config, scheme)
    plan = _plan(target, config, device_map, max_memory, no_split_module_classes, special)
    weights = _Weights(target, scheme, weights_location, layers)
    loading = _Loading(target, scheme, plan, weights, offload_folder)
    quantized = {f"{layer}.weight" for layer in layers}
    ties = [[name for name in group if name not in quantized] for group in find_tied_parameters(target)]
    loading.quantize(layers)
    loading.place_the_rest(config)
    retie_parameters(target, ties)
    index = loading.placement.finish()
    if len(set(plan.values())) > 1 or "disk" in plan.values():
        target = dispatch_model(target, plan, offload_dir=offload_folder, offload_index=index or None)
    if device_map is not None:  # a model to train has none
        target.hf_device_map = plan  # type: ignore[assignment]
    # How it is quantized: for this package, and for peft by the names that peft reads.
    ours = scheme.method == "bitsandbytes"
    marks = {"quantization": scheme, "is_quantized": True}
    marks |= {f"is_loaded_in_{bits}bit": ours and scheme.bits == bits for bits in (8, 4)}
    for name, mark in marks.items():
        setattr(target, name, mark)
    return target.requires_grad_(False).eval()


def _plan(
    model: nn.Module,
    config: QuantizationConfig,
    device_map: str | Mapping[str, Device] | None,
    max_memory: MaxMemory | None,
    no_split_module_classes: str | Sequence[str] | None,
    special: Mapping[str, torch.dtype | str],
) -> dict[str, Device]:
    if device_map is None:
        return {"": torch.cuda.current_device() if torch.cuda.is_available() else "cpu"}
    if isinstance(device_map, str):
        device_map = planned(
            model, device_map, max_memory, no_split_module_classes, config.torch_dtype, special_dtypes=special
        )
    check_plan(model, device_map)
    return dict(device_map)


class _Weights:
    """The weights that a model gets, out of a checkpoint or its own, by name."""

    def __init__(
        self, model: nn.Module, scheme: Scheme, location: str | os.PathLike[str] | None, layers: Sequence[str]
    ) -> None:
        if location is None:
            self.found: dict[str, Source] = {name: (None, value) for name, value in model.state_dict().items()}
        else:
            self.found = dict(checkpoint_weights(location))
        self.statistics: dict[str, dict[str, Tensor]] = {}  # of weights that were quantized when they were saved
        self.names = {name: group for group in find_tied_parameters(model) for name in group}
        for layer in layers:
            beside = {suffix: f"{layer}{suffix}" for suffix in scheme.suffixes if f"{layer}{suffix}" in self.found}
            if beside:
                self.statistics[layer] = {suffix: self.found.pop(name)[1] for suffix, name in beside.items()}
        plain = {name: value for name, (_, value) in self.found.items()}
        for layer in self.statistics:  # as far as its kind of number goes, it fits
            plain[f"{layer}.weight"] = torch.empty(plain[f"{layer}.weight"].shape, device="meta")
        check_fit(model, plain, find_tied_parameters(model), location or "the model itself", strict=False)

    def take(self, name: str) -> Source | None:
        """Return the weight *name*, also where the checkpoint has it under another name of the model; once."""
        for known in (name, *self.names.get(name, ())):
            if known in self.found:
                return self.found.pop(known) if known == name else self.found[known]
        return None


class _Loading:
    """A model whose layers are quantized, and its other weights placed."""

    def __init__(
        self,
        model: nn.Module,
        scheme: Scheme,
        plan: Mapping[str, Device],
        weights: _Weights,
        folder: str | os.PathLike[str] | None,
    ) -> None:
        self.model, self.scheme, self.plan, self.weights = model, scheme, plan, weights
        self.main = computing_device(plan)
        self.away = offloading_devices(self.main)
        self.own = dict(model.state_dict(keep_vars=True))
        self.placement = Placement(model, plan, folder)

    def quantize(self, layers: Sequence[str]) -> None:
        """Put a quantized layer in the place of each of *layers*."""
        main = as_device(self.main)
        read = 0
        for name in layers:
            device = module_device(f"{name}.weight", self.plan)
            offloaded = device in self.away
            if offloaded and not self.scheme.offloads:
                continue
            source = self.weights.take(f"{name}.weight")
            self.own.pop(f"{name}.weight")
            assert source is not None  # the checkpoint fits
            linear = self.model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            saved = self.weights.statistics.get(name)
            path, weight = source
            if saved is not None:
                place = torch.device("cpu") if offloaded else as_device(device)
                there = {suffix: value.to(main) for suffix, value in saved.items()}
                layer = self.scheme.restored_layer(linear, weight.to(place), there, offloaded)
            elif offloaded:
                layer = self.scheme.offloaded_layer(linear, weight, main)
            else:
                layer = self.scheme.layer(linear, weight, as_device(device))
            if device == "disk":
                kept = layer.get_parameter("weight")
                file = path if saved is not None else None
                self.placement.to_disk(f"{name}.weight", (file, kept), torch.int8)
                layer.weight = nn.Parameter(torch.empty_like(kept, device="meta"), requires_grad=False)
            layer.training = linear.training
            self.model.set_submodule(name, layer)
            if path is not None and saved is None:
                will_not_need(weight)
            # What stays lies between what was freed, which the next weight does not fit into.
            read += weight.nbytes
            if read >= _TRIM:
                source = linear = weight = None  # type: ignore[assignment]
                return_free_memory()
                read = 0

    def place_the_rest(self, config: QuantizationConfig) -> None:
        """Place the weights that are not quantized, in the configuration's data types."""
        in_fp32 = list(config.keep_in_fp32_modules or ())
        assert isinstance(config.torch_dtype, torch.dtype)
        rest: dict[str, tuple[Source, torch.dtype | None]] = {}
        for name in self.own:
            source = self.weights.take(name)
            if source is not None:
                rest[name] = (source, torch.float32 if named_by(name, in_fp32) else config.torch_dtype)
        self.placement.put_all(rest)
