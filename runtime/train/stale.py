"""Optimizers whose parameters no model has any more are found before they train nothing, or a part of a model alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def refuse_stale(optimizer: Any, models: Sequence[nn.Module], optimizers: Iterable[Any]) -> None:
    """Refuse *optimizer* if parameters of *models* were replaced after it was made, and it has the old ones.

    A parameter that no model has may be one of the script's own. It was replaced if it has no gradient, and no
    optimizer trains what is in its place. The answer is the same on every rank, whatever shards it has.

    Args:
        optimizer: anything with ``param_groups``.
        models: those that are prepared, as they are now.
        optimizers: all that train them, *optimizer* among them.

    Raises:
        ValueError: all parameters that it trains are gone, or some are.
    """
    known = {id(parameter) for model in models for parameter in model.parameters()}
    own = _parameters(optimizer)
    gone = [parameter for parameter in own if id(parameter) not in known and parameter.grad is None]
    if not gone:
        return
    kind = type(optimizer).__name__
    if len(gone) == len(own):
        raise ValueError(f"{kind} trains parameters that are gone: no prepared model has them. {_REMEDY}")
    trained = {id(parameter) for optimizer in optimizers for parameter in _parameters(optimizer)}
    mine, left = {id(parameter) for parameter in own}, []
    for model in models:
        named = list(model.named_parameters())
        if any(id(parameter) in mine for _, parameter in named):  # others are somebody else's
            left += [name for name, parameter in named if parameter.requires_grad and id(parameter) not in trained]
    if left:
        shown = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        raise ValueError(
            f"{kind} trains {len(gone)} parameters that are gone, of {len(own)}: no prepared model has them, and no "
            f"optimizer trains {shown}. {_REMEDY}. What is not to be trained has requires_grad=False"
        )


_REMEDY = (
    "They were replaced when the model was sharded, or by the script: make the optimizer after fully_shard, or let "
    "prepare shard the model (fsdp_plugin), which hands the new parameters to the optimizer"
)


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
