"""Running out of memory: finding the batch size that fits, and giving memory back."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

# How devices without an exception class of their own say it.
_OUT_OF_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN found no room for the workspace of any algorithm
    "can't allocate memory",  # torch's CPU allocator
    "MODULE:PT_DEVMEM Allocation failed",  # Gaudi
    "RESOURCE_EXHAUSTED",  # XLA
)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether *exception* reports that a device, or the machine, ran out of memory."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(sign in str(exception) for sign in _OUT_OF_MEMORY)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the memory that torch's allocators hold in reserve back to the devices.

    Args:
        garbage_collection: collect Python's garbage first; objects in reference cycles may hold tensors.
    """
    if garbage_collection:
        gc.collect()
    for name in ("cuda", "xpu", "mps", "npu", "mlu", "musa", "sdaa"):
        module: Any = getattr(torch, name, None)
        # Looking must not initialise a device that this process does not use.
        if module is not None and getattr(module, "is_initialized", module.is_available)():
            module.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drop *objects* and free the devices' cached memory; returns as many `None` as there are objects.

    Example:
        >>> a, b = torch.ones(1000, 1000), torch.ones(1000, 1000)
        >>> a, b = release_memory(a, b)
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Decorator: call the function with a batch size, one tenth less, ... until it does not run out of memory.

    The function takes the batch size as its first parameter, which callers leave out. Everything that holds device
    memory must be made inside. Each call begins at *starting_batch_size* again. With several processes all of them must
    run out of memory together; one that does so alone leaves the others waiting in a collective.

    Args:
        function: what to run; left out when the decorator has arguments.
        starting_batch_size: what to try first.
        reduce_batch_size_fn: gives the next batch size, instead of nine tenths; called with the last one if it takes an
            argument.

    Raises:
        TypeError: the caller gave a batch size.
        ValueError: *reduce_batch_size_fn* does not reduce.
        RuntimeError: no batch size was small enough. Other exceptions of the function pass through.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=128)
        ... def train(batch_size):
        ...     return batch_size
        >>> train()
        128
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    inner, reduce = function, _reducer(reduce_batch_size_fn)

    @functools.wraps(inner)
    def search(*args: Any, **kwargs: Any) -> Any:
        _check_call(inner, args)
        size, reason = starting_batch_size, ""
        clear_device_cache(garbage_collection=True)
        while size > 0:
            try:
                return inner(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
            # Behind the except block: until here the exception held the function's frames, and with them its tensors.
            clear_device_cache(garbage_collection=True)
            smaller = reduce(size)
            if smaller >= size:
                raise ValueError(f"reduce_batch_size_fn gave {smaller} after {size}; it has to give smaller sizes")
            size = smaller
        raise RuntimeError(
            f"No executable batch size found, reached zero: {inner.__name__} ran out of memory with every batch size "
            f"from {starting_batch_size} down" + (f"; the last time with {reason}" if reason else "")
        )

    return search


def _reducer(reduce_batch_size_fn: Callable[..., int] | None) -> Callable[[int], int]:
    if reduce_batch_size_fn is None:
        return lambda size: int(size * 0.9)
    chosen = reduce_batch_size_fn
    return chosen if inspect.signature(chosen).parameters else lambda _: chosen()


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(names) < len(args) + 1:
        shown = ", ".join(f"{name}={value}" for name, value in zip(names[1:], args[1:], strict=False))
        raise TypeError(
            f"Batch size was passed into `{function.__name__}` as the first argument when called. "
            f"Remove this as the decorator already does so: `{function.__name__}({shown})`"
        )
