"""Adapters of models of peft: which weights of the model they are, and the names under which peft keeps them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.core.prepared import PreparedModel


def adapter_names(model: PreparedModel, names: Iterable[str]) -> dict[str, str] | None:
    """Return the weights of the active adapter of *model*: peft's names for them, each with its name among *names*.

    `None` of a model that is none of peft's.

    Raises:
        CheckpointError: it is an adapter of which peft saves something else than its weights.
    """
    peft = sys.modules.get("peft")  # where it is not loaded there are no such models
    bare: Any = model.bare
    if peft is None or not isinstance(bare, peft.PeftModel):
        return None
    # peft chooses and renames entries, whatever they are: these stand for the weights, which may be shards.
    marks = {name: torch.empty(0) for name in names}
    kept = peft.get_peft_model_state_dict(
        bare, state_dict=marks, adapter_name=bare.active_adapter, save_embedding_layers=False
    )
    known = {id(mark): name for name, mark in marks.items()}
    if any(id(mark) not in known for mark in kept.values()):
        kind = bare.peft_config[bare.active_adapter].peft_type
        raise CheckpointError(
            f"peft saves an adapter of type {kind} not as the weights that it is trained as: save the whole model "
            "(adapter_only=False), or the adapter with save_pretrained"
        )
    return {name: known[id(mark)] for name, mark in kept.items()}
