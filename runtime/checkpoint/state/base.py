"""The contract of a state strategy: how the state of models and optimizers lies in a checkpoint.

`full` writes each as one file, by one rank of those that share a directory; `dcp` writes a folder to which every rank
adds what it holds. Which one reads is said by the checkpoint, which one writes by `strategy_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from orc.runtime.checkpoint.state.sharding import has_sharded_parameters, models_of
from orc.runtime.core.prepared import Layout, PreparedModel

FULL, SHARDED = "full", "dcp"


class StateStrategy(Protocol):
    """Way of saving and loading the state of models and optimizers.

    What stands in a checkpoint at *index* are the models and optimizers in the order in which they were prepared.
    """

    name: str

    def model_state(self, model: PreparedModel, *, keep: bool) -> dict[str, Any]:
        """Return what to save of *model*; on every rank, which may exchange tensors. Empty where not to *keep* it."""
        ...

    def optimizer_state(self, optimizer: Any, models: Sequence[PreparedModel], *, keep: bool) -> dict[str, Any]:
        """Return the same of *optimizer*, which steps parameters of *models*."""
        ...

    def model_problem(self, source: Any, model: PreparedModel, *, strict: bool = True) -> str | None:
        """Return why *model* would not take its state; changes nothing, and needs no other rank.

        *source* is the folder of shards, or what was read from the file of a full state.
        """
        ...

    def load_model(self, source: Any, model: PreparedModel, *, strict: bool = True) -> None:
        """Load the state into a sharded *model*, on every rank. Raises `CheckpointError` when it does not fit."""
        ...

    def optimizer_problem(self, source: Any, optimizer: Any, models: Sequence[PreparedModel]) -> str | None:
        """Return why *optimizer*, which steps parameters of *models*, would not take its state."""
        ...

    def load_optimizer(self, source: Any, optimizer: Any, models: Sequence[PreparedModel]) -> None:
        """Load the state into an *optimizer* of sharded parameters, on every rank."""
        ...


def strategy_wanted(plugin: Any) -> str | None:
    """Return the name of the strategy that an FSDP *plugin* requests with its ``state_dict_type``; `None` without."""
    wanted = getattr(plugin, "state_dict_type", None)
    if wanted is None:
        return None
    return FULL if str(getattr(wanted, "name", wanted)).upper().startswith("FULL") else SHARDED


def strategy_of(model: PreparedModel, wanted: str | None = None) -> str:
    """Return the name of the strategy that saves *model*: what is *wanted* for sharded models, `dcp` if nothing is.

    Models of which each process has other parameters are saved whole.
    """
    return (wanted or SHARDED) if model.layout in (Layout.SHARDED, Layout.FLATTENED) else FULL


def strategy_of_optimizer(optimizer: Any, models: Sequence[PreparedModel], wanted: str | None = None) -> str:
    """Return the name of the strategy that saves *optimizer*: that of the *models* whose parameters it steps."""
    parts = any(model.layout is Layout.STAGED for model in models_of(optimizer, models))
    return (wanted or SHARDED) if not parts and steps_parts(optimizer, models) else FULL


def steps_parts(optimizer: Any, models: Sequence[PreparedModel]) -> bool:
    """Return whether *optimizer* steps parameters of which this process holds a part alone, those of *models*."""
    sharded = [model for model in models if model.spread]
    return has_sharded_parameters(optimizer) or bool(sharded and models_of(optimizer, sharded))
