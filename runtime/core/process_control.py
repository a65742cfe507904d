"""Control of processes: statements for one process, order between processes, shares of an input."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from orc.runtime.core.context import RunContext

F = TypeVar("F", bound=Callable[..., Any])


class ProcessControl:
    """Properties and methods that Accelerator and the state classes have in common; these provide ``ctx``."""

    __slots__ = ()

    ctx: RunContext

    # places

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self.ctx.world_size

    @property
    def process_index(self) -> int:
        """This process, from 0."""
        return self.ctx.rank

    @property
    def local_process_index(self) -> int:
        """This process on its machine, from 0."""
        return self.ctx.local_rank

    @property
    def device(self) -> torch.device:
        """The device this process computes on."""
        return self.ctx.device

    @property
    def use_distributed(self) -> bool:
        """`True` if the run has more than one process."""
        return self.ctx.distributed

    @property
    def distributed_type(self) -> str:
        """Kind of distributed run; a `DistributedType`."""
        return self.ctx.distributed_type

    @property
    def is_main_process(self) -> bool:
        """Rank 0 of the run; with Megatron-LM the last one, where the losses are."""
        return self.ctx.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Rank 0 of its machine; with Megatron-LM the last one of its machine."""
        return self.ctx.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """The highest rank."""
        return self.ctx.is_last

    # order

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here; nothing with one process."""
        self.ctx.barrier()

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """A block that rank 0 goes through before the others enter it."""
        return goes_first(self.ctx, self.ctx.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """A block that the first process of each machine goes through before the others of the machine enter it."""
        return goes_first(self.ctx, self.ctx.is_local_main_process)

    # statements for one process

    def on_main_process(self, function: F | None = None) -> Any:
        """Decorator: run on the main process only; elsewhere the call returns `None`."""
        return self._only(function, lambda: self.ctx.is_main_process)

    def on_local_main_process(self, function: F | None = None) -> Any:
        """Decorator: run on the main process of each machine only."""
        return self._only(function, lambda: self.ctx.is_local_main_process)

    def on_last_process(self, function: F | None = None) -> Any:
        """Decorator: run on the highest rank only."""
        return self._only(function, lambda: self.ctx.is_last)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: run on rank *process_index* only. Raises `ValueError` without it."""
        wanted = _required("on_process", "process_index", process_index)
        return self._only(function, lambda: self.ctx.rank == wanted)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: run on the process of that index on each machine only. Raises `ValueError` without it."""
        wanted = _required("on_local_process", "local_process_index", local_process_index)
        return self._only(function, lambda: self.ctx.local_rank == wanted)

    def _only(self, function: F | None, condition: Callable[[], bool]) -> Any:
        def decorate(function: F) -> F:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if condition() else None

            return wrapper  # type: ignore[return-value]

        return decorate if function is None else decorate(function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        if self.ctx.is_local_main_process:
            builtins.print(*args, **kwargs)  # noqa: T201

    # shares

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """A block with this process's share of *inputs*; see `split`."""
        return contextlib.nullcontext(split(inputs, *self.ctx.topology.pin_data_share(), apply_padding))


def _required(decorator: str, name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"{decorator} needs {name}: @accelerator.{decorator}({name}=0)")
    return value


@contextlib.contextmanager
def goes_first(ctx: RunContext, first: bool) -> Iterator[None]:
    """Processes with *first* go through the block, then the others enter. Every process must use it."""
    if not first:
        ctx.barrier()
    try:
        yield
    finally:
        # Also when the block raised: the others would wait for ever.
        if first:
            ctx.barrier()


def split(inputs: Any, rank: int, world_size: int, apply_padding: bool = False) -> Any:
    """The share of *inputs* that belongs to *rank*.

    The first processes get one more when the length does not divide.

    Args:
        inputs: a list, tuple, range, tensor or array (along its first dimension), a dataset with ``select`` (as in the
            library ``datasets``), or a mapping of such of equal length.
        rank: whose share.
        world_size: over how many processes.
        apply_padding: repeat the last element of the input so that all shares have the same length.

    Raises:
        TypeError: something that cannot be split.
        ValueError: values of different length in a mapping.
    """
    if world_size == 1:
        return inputs
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items() if _splittable(key, value)}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
            raise ValueError(f"split_between_processes: all values must have the same length, not {shown}")
        return {key: split(value, rank, world_size, apply_padding) for key, value in inputs.items()}
    _splittable(None, inputs)
    share, extra = divmod(len(inputs), world_size)
    start = rank * share + min(rank, extra)
    end = start + share + (rank < extra)
    missing = share + (extra > 0) - (end - start) if apply_padding else 0
    if _is_dataset(inputs):
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    result = inputs[start:end]
    if not missing:
        return result
    if hasattr(inputs, "new_empty"):  # a tensor
        import torch

        return torch.cat([result, *[inputs[-1:]] * missing])
    if _is_array(inputs):
        import numpy

        return numpy.concatenate([result, *[inputs[-1:]] * missing])
    if isinstance(inputs, tuple):
        return (*result, *[inputs[-1]] * missing)
    return [*result, *[inputs[-1]] * missing]


def _is_dataset(inputs: Any) -> bool:
    return callable(getattr(inputs, "select", None)) and not hasattr(inputs, "new_empty")


def _is_array(inputs: Any) -> bool:
    return hasattr(inputs, "__array_interface__") and inputs.ndim > 0


def _splittable(key: Any, value: Any) -> bool:
    if isinstance(value, (list, tuple, range)) or (hasattr(value, "new_empty") and value.ndim > 0):
        return True
    if _is_dataset(value) or _is_array(value):
        return True
    where = "" if key is None else f" at {key!r}"
    raise TypeError(
        f"split_between_processes: cannot split a {type(value).__name__}{where}; "
        "give a list, a tuple, a range, a tensor, an array, a dataset or a dict of such"
    )


def wait_for_everyone() -> None:
    """Wait until every process of the current context has come here."""
    from orc.runtime.core.context import current_context

    current_context().barrier()
