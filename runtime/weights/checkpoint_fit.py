"""The weights of a checkpoint, and whether they are the ones that a model has."""

from __future__ import annotations

import difflib
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.weights.loading import weight_files
from orc.runtime.weights.weights_map import mapped_weights

logger = logging.getLogger(__name__)
_SHOWN = 20  # names in a warning, or compared with those that are not expected; an error has all of them


def checkpoint_weights(checkpoint: str | os.PathLike[str]) -> dict[str, tuple[Path | None, Tensor]]:
    """Return the weights of *checkpoint* by name, mapped into memory, each with the file that holds it.

    Files of `torch.save` in its old format cannot be mapped: their weights are in memory, and no file is named.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    weights: dict[str, tuple[Path | None, Tensor]] = {}
    for path in weight_files(Path(checkpoint)):
        mapped = path.suffix == ".safetensors" or zipfile.is_zipfile(path)
        file = path.absolute() if mapped else None
        weights.update({name: (file, value) for name, value in mapped_weights(path, mapped).items()})
    return weights


def check_fit(
    model: nn.Module,
    found: Mapping[str, Tensor],
    ties: Sequence[Sequence[str]],
    checkpoint: str | os.PathLike[str],
    strict: bool,
    may_lack: bool = False,
) -> None:
    """Refuse a checkpoint whose names, shapes or kinds of numbers are not the model's, before anything is changed.

    Args:
        model: the model; weights that it has already need not be in the checkpoint unless *strict*.
        found: the weights of the checkpoint by name.
        ties: names that the model has for one and the same weight.
        checkpoint: its name, for messages.
        strict: refuse weights that the model does not have, and any weight of the model that the checkpoint lacks.
        may_lack: unless *strict*, say it only where the model has no values for what the checkpoint lacks.

    Raises:
        CheckpointError: it does not fit; all names are listed.
    """
    own = model.state_dict(keep_vars=True)
    wrong = [
        f"{name} has shape {tuple(found[name].shape)}, the model's has {tuple(own[name].shape)}"
        for name in own.keys() & found.keys()
        if own[name].shape != found[name].shape
    ]
    given = {name for group in ties if any(one in found for one in group) for name in group} | found.keys()
    missing = [name for name, value in own.items() if name not in given and (strict or value.is_meta)]
    unexpected = [name for name in found if name not in own]
    quantized = [name for name in own.keys() & found.keys() if _is_quantized(own[name], found[name])]
    if quantized and not wrong:
        raise CheckpointError(
            f"{checkpoint} holds quantized weights ({', '.join(sorted(quantized))}): "
            "load_and_quantize_model with load_in_8bit=True loads them"
        )
    if wrong:
        raise CheckpointError(f"{checkpoint} is of another model: {', '.join(sorted(wrong))}")
    if missing and may_lack and not strict:
        logger.warning("%s lacks %s, which stay without values", checkpoint, _shortened(missing))
        missing = []
    if missing or (strict and unexpected):
        parts = []
        if missing:
            parts.append(f"it lacks {', '.join(_with_nearest(missing, unexpected))}")
        if unexpected:
            parts.append(f"it holds {', '.join(unexpected)}, which the model does not have")
        raise CheckpointError(f"{checkpoint} does not fit the model: {'; '.join(parts)}")
    if unexpected:
        logger.warning("%s holds %s, which the model does not have", checkpoint, _shortened(unexpected))


def _is_quantized(own: Tensor, found: Tensor) -> bool:
    return own.is_floating_point() and found.dtype in (torch.int8, torch.uint8)


def _with_nearest(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    near = {name: difflib.get_close_matches(name, unexpected, n=1, cutoff=0.75) for name in missing[:_SHOWN]}
    return [f"{name} (is it {near[name][0]}?)" if near.get(name) else name for name in missing]


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
