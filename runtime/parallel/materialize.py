"""Models that come without values (``meta``), or with those of rank 0 only, are agreed about and given values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orc.runtime.collectives.objects import all_gather_pickled
from orc.runtime.core.errors import ContextError

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

Spec = list[tuple[tuple[str, ...], tuple[int, ...], str]]


def describe(model: nn.Module) -> Spec:
    """Return names (several where a tensor is shared), shape and type of every parameter and buffer, in order."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in _named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(names[key]), tuple(tensor.shape), str(tensor.dtype)) for key, tensor in tensors.items()]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def agree_on_model(model: nn.Module, ctx: RunContext, prepare: Callable[[], None]) -> None:
    """Check on all ranks that they have the same model, whose values rank 0 has or makes in *prepare*.

    Shared tensors that another rank holds apart, as models made on ``meta`` do, are shared again as on rank 0.

    Raises:
        ContextError: on every rank, with the first reason of any.
    """
    problem, spec = None, describe(model)
    if ctx.is_main:
        try:
            prepare()
        except Exception as error:  # noqa: BLE001 - param_init_fn is the script's; the others must not wait
            ours = isinstance(error, (ValueError, RuntimeError))
            problem = f"rank 0: {error}" if ours else f"rank 0: {type(error).__name__}: {error}"
    if ctx.world_size == 1:
        if problem:
            raise ContextError(problem)
        return
    answers = all_gather_pickled((problem, spec), ctx, "sharding a model")
    wanted: Spec = answers[0][1]
    for rank, (said, theirs) in enumerate(answers):
        if said:
            raise ContextError(said)
        if (difference := _difference(wanted, theirs)) is not None:
            raise ContextError(f"the model of rank {rank} is not that of rank 0: {difference}")
    if spec != wanted:
        _share(model, wanted)


def _difference(wanted: Spec, theirs: Spec) -> str | None:
    mine = {name: (shape, dtype) for names, shape, dtype in wanted for name in names}
    other = {name: (shape, dtype) for names, shape, dtype in theirs for name in names}
    for name in [*mine, *other]:
        if mine.get(name) != other.get(name):
            return f"{name} is {_shown(other.get(name))} instead of {_shown(mine.get(name))}"
    return None


def _shown(described: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if described is None else f"{described[1]} {list(described[0])}"


def _share(model: nn.Module, wanted: Spec) -> None:
    for names, _, _ in wanted:
        first = _get(model, names[0])
        for name in names[1:]:
            _put(model, name, first)


def _get(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), leaf)
    return tensor


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    (module._parameters if leaf in module._parameters else module._buffers)[leaf] = tensor  # type: ignore[assignment]


def initialize(model: nn.Module, init_fn: Callable[[nn.Module], None] | None) -> None:
    """Give every module of *model* that has no values some: by *init_fn*, else by its ``reset_parameters``.

    Raises:
        ValueError: a module without values has neither.
    """
    empty = [module for module in model.modules() if any(t.is_meta for t in _own(module))]
    if not empty:
        return
    allocate(model)
    for module in empty:
        if init_fn is not None:
            init_fn(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            with torch.no_grad():
                reset()
        else:
            raise ValueError(
                f"{type(module).__name__} has parameters or buffers without values (on `meta`) and no "
                "reset_parameters(); give param_init_fn, or make the model with values on rank 0"
            )


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


class Missing:
    """The parameters and buffers of *model* that have no values, and the modules that hold them.

    Shared ones stay shared, whatever is put around modules meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        self._holders.setdefault(tensor, []).append((held, name))

    def allocate(
        self, tensors: Iterable[Tensor], device: torch.device, dtype: Callable[[Tensor], torch.dtype] | None = None
    ) -> list[Tensor]:
        """Return *tensors* with uninitialised memory of *device* in the place of those without values.

        *dtype* says of which type it is; as before unless given. The CPU's costs nothing until it is written to.
        """
        return [self._allocated(tensor, device, dtype) if tensor in self._holders else tensor for tensor in tensors]

    def _allocated(self, tensor: Tensor, device: torch.device, dtype: Callable[[Tensor], torch.dtype] | None) -> Tensor:
        made = torch.empty_like(tensor, device=device, dtype=dtype and dtype(tensor))
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        for held, name in self._holders.pop(tensor):
            held[name] = made
        return made


def allocate(model: nn.Module) -> None:
    """Put uninitialised memory of the CPU in the place of all tensors of *model* without values."""
    Missing(model).allocate([*model.parameters(), *model.buffers()], torch.device("cpu"))
