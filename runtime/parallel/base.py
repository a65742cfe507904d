"""The contract of a parallelizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext


@dataclass(frozen=True, repr=False, eq=False)
class Request:
    """Strategy and options that a script requests when it prepares a model."""

    strategy: str = "auto"
    evaluation: bool = False  # the model is not trained
    options: Mapping[str, Any] = field(default_factory=dict)  # option objects by parallelizer name, or by dimension
    placement: bool = True  # the model belongs on the device of the context
    mixed_precision: str = "no"


def shards_problem(ctx: RunContext) -> str | None:
    """Return why the process group of *ctx* cannot gather DTensors from their shards; `None` where it can."""
    if not ctx.compute.device_in_group:
        return "the process group does not reach the tensors of this device"
    if ctx.backend == "gloo" and ctx.device.type == "cuda":  # functional all_gather; seen with torch 2.11
        return "torch crashes where it gathers shards on GPUs over gloo; use nccl, with one rank for each GPU"
    return None


class Parallelizer:
    """Method of spreading a model over processes. Orders: pipeline 50, tensor 100, context 200, sharding 300,
    replication 400. A new one derives from this class, and says what differs.

    Attributes:
        name: the strategy by which it is asked for, and the key of its options.
        order: those of one model apply in this order.
        default: it is wanted without being asked for, and gives way to whatever it conflicts with.
        needs: names of parallelizers that must apply to the same model.
        conflicts: names of those that must not; saying it on one side is enough.
        places_parameters: it puts the parameters on the device by itself, in pieces: the model comes as the script made
            it (in host memory or on the meta device) and must be on the device afterwards, if the request says so.
        serves: dimensions of the topology, beside those of the data, over which it spreads models. A dimension with
            several ranks that none of those applied serves is refused: copies would differ silently, or waste ranks.
        synchronizes: it brings the gradients of a model together in backward.
    """

    name: str
    order: int
    default: bool = False
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    places_parameters: bool = False
    serves: tuple[str, ...] = ()
    synchronizes: bool = False

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """Return whether to apply it to *model*, in a run that calls for it."""
        return True

    def requires(self, ctx: RunContext) -> str | None:
        """Return the reason why it cannot work in *ctx*, or `None`. Here: an open process group."""
        return None if ctx.group is not None else "the process group is not open"

    def check(self, model: nn.Module, ctx: RunContext, request: Request) -> None:
        """Raise `ContextError`, the same on every rank, if *model* does not go with it; nothing has moved yet."""

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """The transformed model. One that is wrapped is the attribute ``module`` of its wrapper.

        Parameters that others take the place of are found by their names, and optimizers follow them. One that renames
        parameters or joins them says what became of which: `parallel.replacements.replaced`.
        """
        raise NotImplementedError

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """A context in which backward does not synchronise gradients; `None` for models that are not its own."""
        return None

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """A context whose backward synchronises although forward ran without; `None` for models not its own."""
        return None

    def batch_cut(self, ctx: RunContext, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        """Return what makes this rank's part of a batch; `None` where loaders yield whole ones."""
        return None


@runtime_checkable
class ChecksGradients(Protocol):
    """Parallelizer that looks at the first gradients of a model, before the first update."""

    def check_gradients(self, model: nn.Module, ctx: RunContext) -> bool:
        """Return whether the check is done; it is repeated before the next update otherwise.

        Raises:
            ContextError: they are wrong, the same on every rank.
        """
        ...
