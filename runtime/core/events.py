"""Events of a training run: what happens in the loop, sent to its listeners.

Each event is an attribute that holds a tuple of callbacks. Without listeners it is empty, and asking costs one look-up:
``if events.on_step: ...``. A new observer subscribes here; nothing of the engine, the optimizers or the loaders is
replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

Event: TypeAlias = Literal["on_backward", "on_clip", "before_step", "on_step", "on_batch", "on_save"]
Callback: TypeAlias = Callable[..., Any]


class Events:
    """Callbacks of one engine, by event; called in the order in which they subscribed, on the training thread.

    Attributes:
        on_backward: ``(loss, normalized)`` after each backward: the loss as the script gave it; *normalized* where it
            is a sum that ``normalize_by`` divides.
        on_clip: ``(norm)`` after gradients were clipped: their total norm before, as a tensor.
        before_step: ``(optimizer)`` before each update of a prepared optimizer, where gradients are complete. A true
            answer vetoes: this update does not happen.
        on_step: ``(optimizer)`` after each update, vetoed ones not counted.
        on_batch: ``(loader)`` when the loop asks a prepared loader for its next batch: everything of the batch before
            is done.
        on_save: ``(place)`` when `save_state` has saved there, or, with ``block=False``, has copied what it will write.
    """

    __slots__ = ("before_step", "on_backward", "on_batch", "on_clip", "on_save", "on_step")

    on_backward: tuple[Callback, ...]
    on_clip: tuple[Callback, ...]
    before_step: tuple[Callback, ...]
    on_step: tuple[Callback, ...]
    on_batch: tuple[Callback, ...]
    on_save: tuple[Callback, ...]

    def __init__(self) -> None:
        for event in self.__slots__:
            setattr(self, event, ())

    def subscribe(self, event: Event, callback: Callback) -> None:
        """Call *callback* at each *event*; a second time changes nothing.

        Raises:
            ValueError: there is no such event.
        """
        known = self._callbacks(event)
        if callback not in known:
            setattr(self, event, (*known, callback))

    def unsubscribe(self, event: Event, callback: Callback) -> None:
        """Stop calling *callback* at *event*; one that did not subscribe is ignored.

        Raises:
            ValueError: there is no such event.
        """
        setattr(self, event, tuple(known for known in self._callbacks(event) if known != callback))

    def _callbacks(self, event: str) -> tuple[Callback, ...]:
        if event not in self.__slots__:
            raise ValueError(f"there is no event {event!r}; choose from {', '.join(self.__slots__)}")
        callbacks: tuple[Callback, ...] = getattr(self, event)
        return callbacks
