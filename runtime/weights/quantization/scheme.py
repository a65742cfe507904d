"""Schemes of quantized linear layers: one for each library and width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.core.errors import ContextError

# Ways to train on several processes that quantized weights may not go through, by name, and what messages call them.
_WAYS = {
    "replicas": "copies beside tensor parallelism",
    "ddp": "DDP",
    "fsdp1": "FSDP version 1",
    "fsdp2": "FSDP version 2",
    "pp": "pipeline parallelism",
    "tensor": "tensor parallelism",
}


class Scheme(ABC):
    """A way to quantize linear layers. Plug-ins derive from it, and a configuration makes one."""

    label = ""  # in messages: "8-bit (bitsandbytes)"
    method = ""  # the library, as peft and Transformers name it
    bits = 8
    offloads = False  # offloaded layers are quantized too; else they keep their weights in sixteen bits
    saves = False  # the quantized weights can be saved, and loaded again
    suffixes: tuple[str, ...] = ()  # what a checkpoint of quantized weights has beside ``.weight``
    differentiable = True  # gradients go through the quantized layers, to adapters before them
    apart: tuple[str, ...] = ("fsdp1", "pp", "tensor", "library in shards")  # ways that cannot copy or cut the weights
    instead = ""  # what to do then

    @property
    def size_dtype(self) -> str:
        """Name of the data type whose size a quantized weight has."""
        return f"int{self.bits}"

    def problem(self, linear: nn.Linear) -> str | None:
        """Return why *linear* cannot be quantized; `None` where it can."""
        return None

    @abstractmethod
    def layer(self, linear: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Return the quantized layer of *linear*, which keeps its bias, with *weight* on *device*."""

    def offloaded_layer(self, linear: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Return the quantized layer with its weight in host memory, from where hooks bring it to *device*."""
        raise NotImplementedError(f"{self.label} layers are not offloaded")

    def restored_layer(self, linear: nn.Linear, weight: Tensor, saved: dict[str, Tensor], offloaded: bool) -> nn.Module:
        """Return the layer out of a *weight* that was quantized when it was saved, and of the tensors beside it."""
        raise NotImplementedError(f"{self.label} weights are not saved")


def quantization_of(model: nn.Module) -> Scheme | None:
    """Return how *model*, or a model in it, is quantized; `None` where it is not."""
    for module in model.modules():
        scheme = vars(module).get("quantization")
        if isinstance(scheme, Scheme):
            return scheme
    return None


def refuse_to_train(model: nn.Module) -> None:
    """Refuse a quantized *model* that cannot learn as it is.

    Raises:
        ValueError: it is in training mode and nothing of it learns, it is spread by a device map, or no gradient goes
            through its layers.
    """
    scheme = quantization_of(model)
    if scheme is None:
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        if model.training:
            raise ValueError(_without_adapters(scheme))
    elif any(len(places) > 1 or "disk" in places for places in map(_places, model.modules())):
        raise ValueError(
            f"a model with {scheme.label} weights that a device map spreads is for inference: load it without "
            "device_map to train adapters on it"
        )
    elif not scheme.differentiable:
        raise ValueError(f"no gradient goes through {scheme.label} layers to adapters: {scheme.instead}")


def refuse_to_spread(model: nn.Module, ways: Iterable[str], titles: Mapping[str, str] = _WAYS) -> None:
    """Refuse *ways* to train on several processes that the weights of a quantized *model* do not go through.

    *titles* are what messages call them.

    Raises:
        ContextError: there is one; the same on every rank.
    """
    scheme = quantization_of(model)
    way = None if scheme is None else next((way for way in ways if way in scheme.apart), None)
    if scheme is not None and way is not None:
        raise ContextError(f"{scheme.label} weights do not go with {titles[way]}: {scheme.instead}")


def refuse_to_optimize(parameters: Iterable[Tensor], models: Iterable[nn.Module]) -> None:
    """Refuse an optimizer of *parameters* none of which learn, where one of *models* is quantized.

    Raises:
        ValueError: it is one.
    """
    if any(parameter.requires_grad for parameter in parameters):
        return
    scheme = next((quantized for model in models if (quantized := quantization_of(model)) is not None), None)
    if scheme is not None:
        raise ValueError(_without_adapters(scheme))


def refuse_to_save(model: nn.Module) -> None:
    """Refuse a *model* whose quantized weights cannot be loaded again.

    Raises:
        CheckpointError: it is one.
    """
    scheme = quantization_of(model)
    if scheme is not None and not scheme.saves:
        raise CheckpointError(
            f"{scheme.label} weights cannot be saved: keep the weights that they were made from, and quantize them "
            "when they are loaded; adapters are saved by their own library (peft: save_pretrained)"
        )


def _without_adapters(scheme: Scheme) -> str:
    return (
        f"{scheme.label} weights do not learn: put adapters on the model first (peft.get_peft_model) and give the "
        "optimizer their parameters; for inference, prepare it after model.eval() and without an optimizer"
    )


def _places(module: nn.Module) -> set[object]:
    return set((vars(module).get("hf_device_map") or {}).values())
