"""Records of models: what the parts of the runtime want to know of a model, looked up once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from torch import nn

from orc.runtime.core import libraries
from orc.runtime.core.prepared import GradientSync, Layout, Prepared, PreparedModel
from orc.runtime.parallel import (
    Parallelizer,
    extract_model_from_parallel,
    is_flattened,
    is_sharded,
    synchronizer_of,
)


def described(model: nn.Module, applied: Sequence[Parallelizer] = ()) -> PreparedModel:
    """Return the record of *model* as it is now: when it has been prepared, or of one that never is.

    Those *applied* have made it parallel; what the script did by itself is seen.
    """
    parts = sys.modules.get("orc.runtime.parallel.partition")  # where it is not loaded, no model is cut into parts
    partition, cut = None if parts is None else parts.partition_of(model), is_sharded(model)
    if not applied and libraries.inside(model) is not None:
        layout = Layout.OF_ENGINE
    elif partition is not None:
        layout = Layout.STAGED
    elif cut:
        layout = Layout.FLATTENED if is_flattened(model) else Layout.SHARDED
    else:
        layout = Layout.GATHERED if getattr(model, "gathers_state", False) else Layout.WHOLE
    return PreparedModel(
        model=model,
        bare=extract_model_from_parallel(model, keep_torch_compile=False),
        gradients=gradients_of(model, applied),
        layout=layout,
        cut=cut,
        partition=partition,
    )


def record_of(prepared: Prepared, model: nn.Module) -> PreparedModel:
    """Return the record of *model*, made anew if it was not *prepared*."""
    return prepared.record_of(model) or described(model)


def records_of(prepared: Prepared, models: Iterable[nn.Module] | None = None) -> list[PreparedModel]:
    """Return the records of *models*, by default of all that are *prepared*, in their order."""
    return [record_of(prepared, model) for model in (prepared.models if models is None else models)]


def gradients_of(model: nn.Module, applied: Sequence[Parallelizer] = ()) -> GradientSync:
    """Return how the gradients of *model* come together, which those *applied* have made parallel, or the script."""
    inside = model._modules.get("_orig_mod") or model  # what torch.compile made of it
    own = next((parallelizer for parallelizer in applied if parallelizer.synchronizes), None)
    return GradientSync(inside, own or synchronizer_of(inside))
