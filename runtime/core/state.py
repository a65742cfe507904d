"""`GradientState`, and the base of all read-only views of the current context.

All instances of a class show the same state, which is made on first use. ``_reset_state`` forgets it (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orc.runtime.core.accumulation import PreparedLoader
from orc.runtime.core.context import RunContext, current_context, peek_context
from orc.runtime.core.handlers import GradientAccumulationPlugin

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank


class _Shared:
    """Dictionary of the attributes that all instances of a class share; empty while there is no context.

    Libraries look at it (``PartialState._shared_state == {}``) to learn whether this process has been set up.
    """

    def __get__(self, instance: Any, owner: type[View]) -> dict[str, Any]:
        context = peek_context()
        if context is None or not owner._is_set_up(context):
            return {}
        view = owner.of(context)
        # A context that was closed or never started answers every property but those that need a group.
        return {"_cpu": context.device.type == "cpu"} | {name: getattr(view, name) for name in owner._shown}


class View:
    """Base of read-only views of the current context."""

    __slots__ = ()

    _shared_state = _Shared()
    _shown: tuple[str, ...] = ()

    @classmethod
    def _is_set_up(cls, context: RunContext) -> bool:
        return True

    @classmethod
    def of(cls, ctx: RunContext) -> Self:
        """The view of *ctx*."""
        view = object.__new__(cls)
        object.__setattr__(view, "ctx", ctx)
        return view

    def __getattribute__(self, name: str) -> Any:
        # Dunders and private names are for Python, libraries' checks and this class.
        if not name.startswith("_") and name != "initialized" and object.__getattribute__(self, "ctx").forgotten:
            self._catch_up(name)
        return object.__getattribute__(self, name)

    def _catch_up(self, name: str) -> None:
        """Show the process context that was made since the reset. Raises `AttributeError` where there is none."""
        context = peek_context()
        if context is None or context.forgotten:
            raise AttributeError(
                f"`{type(self).__name__}` object has no attribute `{name}`: its state was reset by "
                f"`{type(self).__name__}._reset_state()`. Make an `Accelerator` or a `PartialState` to set it up again"
            )
        object.__setattr__(self, "ctx", context)

    @property
    def initialized(self) -> bool:
        """`False` after a reset, until the next Accelerator or PartialState."""
        context = object.__getattribute__(self, "ctx")
        return not context.forgotten or peek_context() is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self.ctx,)  # a copy shows the same run, a pickle what its process was

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(attribute := getattr(type(self), name, None), property) and attribute.fset is not None:
            attribute.fset(self, value)
            return
        raise AttributeError(f"{type(self).__name__} is read-only; {name} is decided when the process starts")


class GradientState(View):
    """Accumulation and synchronisation of gradients, and the loader being iterated."""

    __slots__ = ("ctx",)

    _shown = ("sync_gradients", "dataloader_references", "plugin_kwargs")

    ctx: RunContext

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        """Show the run's state, with the settings of *gradient_accumulation_plugin* if it is given."""
        object.__setattr__(self, "ctx", current_context())
        if gradient_accumulation_plugin is not None:
            self.ctx.gradient.follow(gradient_accumulation_plugin)

    @property
    def sync_gradients(self) -> bool:
        """`True` if this step's gradients are synchronised and applied."""
        return self.ctx.gradient.sync_gradients

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Decide whether the next backward synchronises gradients, and the optimizer steps: for loops that accumulate
        by themselves, instead of with `Accelerator.accumulate`.
        """
        self.ctx.gradient.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
        return self.ctx.gradient.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """As given by the plug-in."""
        return self.ctx.gradient.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """`True` if the last batch of a pass always synchronises gradients."""
        return self.ctx.gradient.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """`True` if gradients are synchronised on every batch."""
        return self.ctx.gradient.sync_each_batch

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Options of accumulation that differ from the defaults of `GradientAccumulationPlugin`."""
        gradient = self.ctx.gradient
        return GradientAccumulationPlugin(
            num_steps=gradient.num_steps,
            adjust_scheduler=gradient.adjust_scheduler,
            sync_with_dataloader=gradient.sync_with_dataloader,
            sync_each_batch=gradient.sync_each_batch,
        ).to_kwargs()

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """The prepared loaders being iterated, innermost last; `None` stands for the outside."""
        return [None, *self.ctx.gradient.active]

    @property
    def in_dataloader(self) -> bool:
        """`True` while a prepared loader is being iterated."""
        return bool(self.ctx.gradient.active)

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The innermost prepared loader being iterated."""
        return self.ctx.gradient.active[-1] if self.ctx.gradient.active else None

    @property
    def end_of_dataloader(self) -> bool:
        """`True` if the innermost loader being iterated has just yielded its last batch."""
        return self.ctx.gradient.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are no duplicates; -1 when none are or it is not the last."""
        return self.ctx.gradient.remainder

    @staticmethod
    def _reset_state() -> None:
        context = peek_context()
        if context is not None:
            context.gradient.reset()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation steps: {self.num_steps}\n"
        )
