"""Training of models whose stages lie on several processes: norms and states are those of all stages together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from orc.runtime.core.errors import ContextError
from orc.runtime.engine.native import NativeEngine
from orc.runtime.parallel.compile import compiles
from orc.runtime.parallel.norms import clip_norm
from orc.runtime.parallel.partition import check_orders, whole_model
from orc.runtime.parallel.records import record_of
from orc.runtime.train.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
    from orc.runtime.train.engine import Preparing


class PipelineEngine(NativeEngine):
    """The native engine, for stages. A loss of a pipeline has its gradients already, which its backward adds."""

    name = "pipeline"

    def prepare(
        self, objects: Sequence[Any], placement: Sequence[bool | None], preparation: Preparing
    ) -> Sequence[Any]:
        """Prepare all *objects*.

        Raises:
            ContextError: models are to be compiled.
            ValueError: an optimizer was made from the parameters of one stage. On every process.
        """
        if compiles(preparation.dynamo):
            raise ContextError(
                "torch.compile (dynamo_backend, dynamo_plugin) cannot be combined with pp_size: stages are traced "
                "already; leave it out"
            )
        result = super().prepare(objects, placement, preparation)
        partition = next((record.partition for record in self.prepared.records if record.partition is not None), None)
        optimizers = [item.optimizer for item in result if isinstance(item, AcceleratedOptimizer)]
        if partition is not None and optimizers:
            check_orders(partition.ctx, optimizers)
        return result

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages down to *max_norm*; returns their norm before. All processes call it."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        group = self.ctx.topology.group("pp")
        norm = clip_norm(parameters, max_norm, float(norm_type), sharded=True, over=group)
        for tell in self.events.on_clip:
            tell(norm)
        return norm

    def model_state(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete state dict of *model*, gathered from its stages; all processes call it."""
        record = record_of(self.prepared, model)
        if record.partition is None:
            return super().model_state(model, unwrap=unwrap)
        return whole_model(record.partition, record.bare.state_dict(), keep=True)


ENGINE = PipelineEngine
