"""Base of the engines of libraries: they scale, clip and synchronize gradients by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from orc.runtime.core.events import Events
from orc.runtime.core.prepared import Prepared, PreparedOptimizer
from orc.runtime.parallel import extract_model_from_parallel
from orc.runtime.train.normalize import LossNormalizer

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.options import Options
    from orc.runtime.train.engine import OwnState


class LibraryEngine:
    """What the engines of libraries have in common; subclasses prepare, compute gradients, step and clip by norm."""

    name: str

    def __init__(self, ctx: RunContext, options: Options | None = None, prepared: Prepared | None = None) -> None:
        self.ctx = ctx
        self.prepared = Prepared() if prepared is None else prepared
        self.prepared.engine = self
        self.prepared.scaler = None
        self.events = Events()
        self.normalizer = LossNormalizer(ctx, tuple)
        self.own_state: OwnState | None = None
        self._gradient = ctx.gradient

    @property
    def title(self) -> str:
        """Name of the library, for messages."""
        return str(self.ctx.library.title)

    @property
    def scaler(self) -> None:
        """The gradient scaler: none, the library scales by itself."""
        return

    def zero_grad(self, optimizer: PreparedOptimizer, set_to_none: bool = True) -> None:
        """Do nothing: the library clears the gradients."""

    def fused_backward(self, loss: Tensor, optimizers: Sequence[Any], learning_rate: float) -> None:
        """Refused. Raises `ValueError`: the library updates by itself."""
        raise ValueError(f"lomo_backward is not possible with {self.title}, which updates by itself")

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Refused. Raises `ValueError`: the library clips by norm alone."""
        raise ValueError(f"clip_grad_value_ is not possible with {self.title}; it clips by norm (gradient_clipping)")

    def unscale(self, optimizers: Sequence[Any] | None = None) -> None:
        """Do nothing: the library scales by itself."""

    def forget(self) -> None:
        """Do nothing: what is prepared is known by ``prepared`` alone."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return an empty block: the library synchronizes when it updates."""
        return nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return an empty block."""
        return nullcontext()

    def model_state(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete state dict of *model*."""
        return dict((extract_model_from_parallel(model) if unwrap else model).state_dict())
