"""Parameters that others take the place of when a model moves to its device, as with torch_xla."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


class MovedParameters:
    """Map from replaced parameters to those in their place. Does not keep the old ones alive."""

    def __init__(self) -> None:
        self._new: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __reduce__(self) -> tuple[type[MovedParameters], tuple[()]]:
        return MovedParameters, ()  # copies of the parameters are others

    def move(self, model: nn.Module, device: torch.device) -> nn.Module:
        """*model* on *device*; parameters that were one (tied weights) are one again."""
        from orc.runtime.weights.device_map import find_tied_parameters, retie_parameters

        tied = find_tied_parameters(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        model = model.to(device)
        retie_parameters(model, tied)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if before[name] is not parameter:
                self._new[before[name]] = parameter
        return model

    def follow(self, optimizer: Optimizer) -> None:
        """Let *optimizer* train the new parameters where it has old ones."""
        if not len(self._new):
            return
        for group in optimizer.param_groups:
            group["params"] = [self._new.get(one, one) for one in group["params"]]
        for old in [one for one in optimizer.state if one in self._new]:
            optimizer.state[self._new[old]] = optimizer.state.pop(old)
