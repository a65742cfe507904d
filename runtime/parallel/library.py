"""Models that a library trains: finding what the script wrote, and making no replicas."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from orc.runtime.core.libraries import libraries
from orc.runtime.parallel.base import Request

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext


class LibraryModels:
    """Models that a library trains. Its engine makes them from all objects of one ``prepare``, not from one model."""

    name = "library"
    order = 10  # before what it would conflict with: its own refusal says what to do
    default = False
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ("ddp", "context", "pp", "sequence", "tensor")
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
        """The module inside what a library made of it."""
        return next((inner for library in libraries().values() if (inner := library.inside(model)) is not None), None)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """Not its business."""
        return None

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """Not its business."""
        return None


PARALLELIZER = LibraryModels()
