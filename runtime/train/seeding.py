"""Random number generators: seeding them, and keeping them equal over the processes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from orc.runtime.core.availability import is_torch_xla_available
from orc.runtime.core.context import RunContext, current_context
from orc.runtime.core.enums import RNGType
from orc.runtime.launch.xla import xla_model


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy (if installed), torch, its devices, and XLA (if installed).

    Args:
        seed: the seed.
        device_specific: add this process's data rank: its rank, unless peers get the same batch; those draw the same
            numbers.
        deterministic: let torch use deterministic algorithms only (some are slower, some do not exist).
    """
    if device_specific:
        seed += current_context().topology.data_rank
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # all devices
    if is_torch_xla_available():
        xla_model().set_rng_state(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None, *, ctx: RunContext | None = None
) -> None:
    """Give one generator the state it has on rank 0, on all processes.

    Args:
        rng_type: ``torch``, ``cuda``, ``mps``, ``xpu``, ``npu``, ``xla`` or ``generator``.
        generator: which one, for ``generator``.
        ctx: the process context.

    Raises:
        ValueError: an unknown type, one of a device that is not here, or ``generator`` without one.
    """
    try:
        kind = RNGType(rng_type or RNGType.TORCH)
    except ValueError:
        known = ", ".join(RNGType)
        raise ValueError(f"unknown random number generator {rng_type!r}; choose from {known}") from None
    ctx = ctx or current_context()
    if kind is RNGType.GENERATOR and generator is None:
        raise ValueError("rng type 'generator' needs the generator to synchronise")
    if ctx.world_size == 1:
        return
    source: Any
    if kind is RNGType.TORCH:
        source = (torch.get_rng_state, torch.set_rng_state)
    elif kind is RNGType.GENERATOR:
        assert generator is not None
        source = (generator.get_state, generator.set_state)
    elif kind is RNGType.XLA:
        _synchronize_xla(ctx)
        return
    else:
        device = getattr(torch, kind, None)
        if device is None or not device.is_available():
            raise ValueError(f"there is no {kind} device here whose random number generator could be synchronised")
        source = (device.get_rng_state, device.set_rng_state)
    from orc.runtime.collectives.collectives import broadcast

    get_state, set_state = source
    state = get_state().to(ctx.control_device)
    set_state(broadcast(state, ctx=ctx).cpu())


def _synchronize_xla(ctx: RunContext) -> None:
    if not is_torch_xla_available():
        raise ValueError("there is no xla device here whose random number generator could be synchronised")
    from orc.runtime.collectives.collectives import broadcast

    model = xla_model()
    seed = torch.tensor(model.get_rng_state(), device=ctx.control_device)
    model.set_rng_state(int(broadcast(seed, ctx=ctx).item()))


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None, *, ctx: RunContext | None = None
) -> None:
    """`synchronize_rng_state` for each of *rng_types*.

    Args:
        generator: the generator of ``generator``.
        ctx: the run; the current one unless given.
    """
    for kind in rng_types:
        synchronize_rng_state(kind, generator, ctx=ctx)
