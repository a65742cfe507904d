"""Compression of gradients in data-parallel training: torch's communication hooks by their documented names."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from orc.runtime.core.handlers import DDPCommunicationHookType as Kind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

    from orc.runtime.core.handlers import DistributedDataParallelKwargs

Hook = Callable[[Any, Any], Any]


def bf16_hook(state: Any, bucket):  # type: ignore[no-untyped-def]
    """torch's bf16 compression under another name: torch refuses its own where there is no NCCL, but gloo adds bf16."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _orthogonalize(matrix: Any, *args: Any, **kwargs: Any) -> None:
    powerSGD_hook._orthogonalize(matrix.unsqueeze(0) if matrix.ndim == 2 else matrix, *args, **kwargs)


# torch's batched hook gives its matrices to a function that takes stacks of matrices only, and fails (up to 2.13 at
# least) as soon as it begins to compress. This is the same code with a function in that place that takes both.
_batched = powerSGD_hook.batched_powerSGD_hook
batched_power_sgd_hook = types.FunctionType(
    _batched.__code__, {**_batched.__globals__, "_orthogonalize": _orthogonalize}, _batched.__name__
)

_HOOKS: dict[Kind, Hook] = {
    Kind.NO: default_hooks.allreduce_hook,
    Kind.FP16: default_hooks.fp16_compress_hook,
    Kind.BF16: bf16_hook,
    Kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
    Kind.BATCHED_POWER_SGD: batched_power_sgd_hook,
}
_WRAPPERS: dict[Kind, Callable[[Hook], Hook]] = {
    Kind.FP16: default_hooks.fp16_compress_wrapper,
    Kind.BF16: default_hooks.bf16_compress_wrapper,
}
_WITH_STATE = (Kind.POWER_SGD, Kind.BATCHED_POWER_SGD)


def compress_gradients(
    model: DistributedDataParallel, group: ProcessGroup, options: DistributedDataParallelKwargs
) -> None:
    """Register on *model* what *options* request; nothing when they request nothing.

    Raises:
        ValueError: a wrapper that is none, or options for a hook that takes none or does not know them.
    """
    kind, wrapper = options.comm_hook, options.comm_wrapper
    if wrapper not in (Kind.NO, *_WRAPPERS):
        raise ValueError(f"comm_wrapper {wrapper} wraps nothing; choose no, fp16 or bf16")
    if options.comm_state_option and kind not in _WITH_STATE:
        names = ", ".join(options.comm_state_option)
        raise ValueError(f"comm_state_option ({names}): comm_hook {kind} has no options; power_sgd does")
    if kind is Kind.NO and wrapper is Kind.NO:
        return
    hook = _HOOKS[kind]
    state: object = group
    if kind in _WITH_STATE:
        try:
            state = powerSGD_hook.PowerSGDState(group, **options.comm_state_option)
        except TypeError as error:
            raise ValueError(f"comm_state_option of comm_hook {kind}: {error}") from None
    if wrapper is not Kind.NO:
        hook = _WRAPPERS[wrapper](hook)
        hook.__name__ = f"{wrapper}_wrapped_{kind}"  # for the reason given at `bf16_hook`
    model.register_comm_hook(state, hook)
