"""Models that a library trains (DeepSpeed, Megatron-LM): finding what the script wrote, and making no replicas."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from orc.runtime.parallel.base import Request

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext


def is_engine(model: Any) -> bool:
    """Return whether *model* is an engine of DeepSpeed, which has the model that the script wrote inside."""
    library = sys.modules.get("deepspeed")  # where it is not loaded there are no engines
    kind = getattr(library, "DeepSpeedEngine", None)
    return kind is not None and isinstance(model, kind)


class LibraryModels:
    """Models that a library trains. Its engine makes them from all objects of one ``prepare``, not from one model."""

    name = "deepspeed"
    order = 10  # before what it would conflict with: its own refusal says what to do
    default = False
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ("ddp",)
    places_parameters = False
    serves: tuple[str, ...] = ()

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """For a model that is prepared by itself to be trained."""
        return ctx.library is not None and not request.evaluation

    def requires(self, ctx: RunContext) -> str | None:
        """Refused: its optimizer is missing."""
        return f"{ctx.library.title} needs the model with its optimizer: accelerator.prepare(model, optimizer, ...)"

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model* as it is."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module | None:
        """The module inside an engine of DeepSpeed."""
        return cast("nn.Module", model.module) if is_engine(model) else None

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """Not its business."""
        return None

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """Not its business."""
        return None


PARALLELIZER = LibraryModels()
