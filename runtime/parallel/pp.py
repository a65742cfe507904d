"""Pipeline parallelism: each process trains the layers of one stage or several, on one micro-batch after the other."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import ConfigError
from orc.runtime.parallel.base import Parallelizer, Request
from orc.runtime.parallel.pipeline import PipelineParallelConfig

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext


class PipelineParallel(Parallelizer):
    """Stages over the dimension ``pp`` of the topology; a model that computes its loss by itself where it is 1."""

    name = "pp"
    order = 50
    serves: tuple[str, ...] = ("pp",)
    conflicts: tuple[str, ...] = ("xla",)
    places_parameters = True

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """For a model that is trained."""
        return not request.evaluation and next(model.parameters(), None) is not None

    def requires(self, ctx: RunContext) -> str | None:
        """No other way to share the work of one batch, and nothing that scales losses."""
        if not ctx.compute.device_in_group:
            return "the process group does not reach the tensors of this device"
        if ctx.topology.size("pp") == 1:
            return None
        if others := [name for name in ("tp", "cp", "sp") if ctx.topology.size(name) > 1]:
            return (
                f"{' and '.join(others)} cannot be combined with pp: stages are traced as one process computes them; "
                "combine pp with dp_replicate or dp_shard"
            )
        if importlib.util.find_spec("torch.distributed.pipelining") is None:
            return "this torch has no torch.distributed.pipelining; install 2.4 or newer"
        if ctx.config.mixed_precision == "fp8":
            return (
                "layers that compute in fp8 cannot be traced into stages; share the work by dp_shard_size, cp_size or "
                "sp_size, or use bf16"
            )
        if ctx.config.mixed_precision == "fp16":
            return "fp16 scales losses, and a pipeline has run backward when its loss is known; use bf16"
        return "the process group is not open" if ctx.group is None else None

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Cut *model*, and keep the stages of this process."""
        from orc.runtime.parallel.pipeline_model import PipelineModel, into_stages
        from orc.runtime.parallel.replacements import move

        config: Any = request.options.get("pp")
        if config is None:
            raise ConfigError(
                f"pp_size={ctx.topology.size('pp')} needs pp_handler=PipelineParallelConfig(loss_fn=..., "
                "example_args=...) in the ParallelismConfig: a pipeline computes the loss by itself"
            )
        if not isinstance(config, PipelineParallelConfig):
            raise TypeError(f"pp_handler is a {type(config).__name__}, not a PipelineParallelConfig")
        if ctx.topology.size("pp") > 1:
            return into_stages(model, config, ctx, place=request.placement)
        if request.placement and request.options.get("fsdp") is None:  # which places the parameters in pieces
            model = move(model, ctx.device)
        return PipelineModel(model, config, None)


PARALLELIZER = PipelineParallel()
