"""Records of models: what the parts of the runtime want to know of a model, looked up once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from orc.runtime.core.prepared import GradientSync, Layout, Prepared, PreparedModel
from orc.runtime.parallel import extract_model_from_parallel, is_sharded, parallelizers

if TYPE_CHECKING:
    from orc.runtime.parallel.partition import Partition


def described(model: nn.Module) -> PreparedModel:
    """Return the record of *model* as it is now: when it has been prepared, or of one that never is."""
    from orc.runtime.parallel.partition import partition_of  # an Accelerator that prepares no model needs none

    partition, cut = partition_of(model), is_sharded(model)
    return PreparedModel(
        model=model,
        bare=extract_model_from_parallel(model, keep_torch_compile=False),
        gradients=_gradients(model),
        layout=_layout(model, partition, cut),
        cut=cut,
        partition=partition,
    )


def record_of(prepared: Prepared, model: nn.Module) -> PreparedModel:
    """Return the record of *model*, made anew if it was not *prepared*."""
    return prepared.record_of(model) or described(model)


def gradients_of(prepared: Prepared, model: nn.Module) -> GradientSync:
    """Return how the gradients of *model* come together, looked up if it was not *prepared*."""
    record = prepared.record_of(model)
    return _gradients(model) if record is None else record.gradients


def records_of(prepared: Prepared, models: Iterable[nn.Module] | None = None) -> list[PreparedModel]:
    """Return the records of *models*, by default of all that are *prepared*, in their order."""
    return [record_of(prepared, model) for model in (prepared.models if models is None else models)]


def _gradients(model: nn.Module) -> GradientSync:
    inside = model._modules.get("_orig_mod") or model  # what torch.compile made of it
    return GradientSync(
        inside,
        next((parallelizer for parallelizer in parallelizers() if parallelizer.no_sync(inside) is not None), None),
    )


def _layout(model: nn.Module, partition: Partition | None, cut: bool) -> Layout:
    from orc.runtime.parallel.fsdp import is_instance
    from orc.runtime.parallel.library import PARALLELIZER

    if PARALLELIZER.unwrap(model) is not None:
        return Layout.OF_ENGINE
    if partition is not None:
        return Layout.STAGED
    if cut:
        flattened = any(is_instance(module, "FullyShardedDataParallel") for module in model.modules())
        return Layout.FLATTENED if flattened else Layout.SHARDED
    return Layout.GATHERED if getattr(model, "gathers_state", False) else Layout.WHOLE
