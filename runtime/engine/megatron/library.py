"""The library `megatron.core`, imported when it is needed, its process groups and its random numbers."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from orc.runtime.core.timeouts import asked_timeout

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.engine.megatron.plugin import MegatronLMPlugin

_OLDEST = "0.13"


@cache
def megatron() -> Any:
    """Return the module `megatron.core`.

    Raises:
        ImportError: it is not installed, is too old, or cannot be imported; the text says what to do.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ImportError("training with Megatron-LM needs the package megatron-core: pip install megatron-core")
    from orc.runtime.core.availability import compare_versions

    if not compare_versions("megatron-core", ">=", _OLDEST):
        raise ImportError(f"megatron-core is too old: {_OLDEST} or later is needed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells of every optional package that is absent
            import megatron.core as module
    except Exception as error:
        raise ImportError(
            f"the package megatron-core is installed but cannot be imported ({type(error).__name__}: {error})"
        ) from error
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")  # of what is absent, each time
    # Newer releases of torch rename collectives, of which every single call by Megatron-LM would tell the user.
    warnings.filterwarnings("ignore", r"(?s).*torch\.distributed\.\w+` is deprecated", FutureWarning)
    return module


def open_groups(ctx: RunContext, plugin: MegatronLMPlugin, pieces: int) -> Any:
    """Open Megatron-LM's process groups as *plugin* lays the ranks out; returns its module `parallel_state`.

    Each process will have so many *pieces* of the model, one where the schedule is not interleaved.

    The layout is that of the topology: tensor parallel processes are neighbours, stages are farthest apart.
    """
    parallel_state = megatron().parallel_state
    sizes = (plugin.tp_degree, plugin.pp_degree)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # of an earlier Accelerator of this process
    if not dist.is_initialized():
        from orc.runtime.launch.process_group import open_alone

        open_alone(ctx.device)
    virtual = pieces if pieces > 1 else None
    asked = asked_timeout()
    options = {} if asked is None else {"distributed_timeout_minutes": math.ceil(asked.total_seconds() / 60)}
    parallel_state.initialize_model_parallel(*sizes, virtual, order="tp-cp-ep-dp-pp", **options)
    return parallel_state


class Random:
    """Random numbers of one process's part of the model.

    Outside tensor parallel regions the tensor parallel processes must draw the same (dropout of what all of them have),
    inside each its own, as must stages and data parallel processes. The script's own generators stay as they are.

    Args:
        ctx: the run.
        seed: the same on every process.
    """

    def __init__(self, ctx: RunContext, seed: int) -> None:
        topology = ctx.topology
        own = seed + 100 * topology.place("pp") + 10 * topology.data_rank
        region = own + 2718 + topology.place("tp")
        self._cpu = ctx.device.type == "cpu"
        if self._cpu:
            from orc.runtime.engine.megatron.on_cpu import REGION, adapt

            adapt().add(REGION, region)
            self._state = torch.Generator().manual_seed(own).get_state()
        else:  # the generators of the device: nobody else draws from them while it trains
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(seed)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Draw from these inside the block, from the script's afterwards."""
        if not self._cpu:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(outside)


def common_seed(ctx: RunContext) -> int:
    """Return a seed that all processes share: the run's, else one that rank 0 draws. Collective."""
    if ctx.config.seed is not None:
        return int(ctx.config.seed)
    drawn = torch.randint(2**31, (1,), device=ctx.device)
    if ctx.distributed:
        dist.broadcast(drawn, 0, group=ctx.require_group("a common seed"))
    return int(drawn)
