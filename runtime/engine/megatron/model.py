"""The prepared model: calling it runs Megatron-LM's schedule over the micro batches of a batch, backward included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from orc.runtime.engine.megatron import states
from orc.runtime.engine.megatron.generation import Generating
from orc.runtime.engine.megatron.layout import layout_of

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.engine.megatron.library import Random
    from orc.runtime.engine.megatron.plugin import MegatronLMPlugin


class MegatronModel(Generating):
    """This process's pieces of a model that Megatron-LM trains.

    ``model(**batch)`` returns what a Transformers model does, with the loss averaged over micro batches and data
    parallel processes, the same on every process. In training it has computed the gradients too.

    Args:
        model: the Transformers model, whose weights it takes.
        ctx: the run.
        plugin: says how to split it.
        random: where dropout draws.

    Attributes:
        bare: this process's pieces, without what is around them.
        gathers_state: its state dict is whole, and all processes ask for it together.
    """

    gathers_state = True
    train_step: Any

    def __init__(self, model: nn.Module, ctx: RunContext, plugin: MegatronLMPlugin, random: Random) -> None:
        super().__init__()
        self.config: Any = model.config
        self.ctx, self.plugin, self.device, self._random = ctx, plugin, ctx.device, random
        precision = str(ctx.config.mixed_precision)
        self._half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.layout = layout_of(model, plugin, ctx.device, torch.float32 if self._half is None else self._half)
        plugin.model_config = self.config
        pieces = self.layout.build()
        if self._half is not None:
            from megatron.core.transformer.module import Float16Module

            wrapped = [Float16Module(self.layout.config, piece.to(self._half)) for piece in pieces]
        else:
            wrapped = pieces
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=plugin.use_distributed_optimizer and plugin.data_parallel_size != 1,
            grad_reduce_in_fp32=self._half is not None,
        )
        self.pieces = nn.ModuleList(DistributedDataParallel(self.layout.config, settings, piece) for piece in wrapped)
        self.bare = pieces
        self.masters: states.Masters | None = None  # until there is an optimizer
        if ctx.device.type == "cpu":
            from orc.runtime.engine.megatron.on_cpu import name_types

            name_types(self.parameters())
        self.load_state_dict(self.layout.adopted(model.state_dict()))
        self.layout.config.finalize_model_grads_func = finalize_model_grads
        self.train_step = self._train_step()
        self.loss: Tensor | None = None  # of the last batch that gradients were computed for
        self.overflowed: bool | None = None  # whether its gradients did; `None` until they are prepared for the update
        self.train(model.training)

    def _train_step(self) -> Any:
        kind: Any = self.plugin.custom_train_step_class or self.layout.train_step()
        made: Any = kind(self.plugin, **(self.plugin.custom_train_step_kwargs or {}))
        if not callable(getattr(made, "forward_step", None)):
            made.forward_step = made.get_forward_step_func()
        return made

    # ---- computing

    def forward(self, **batch: Any) -> Any:
        """Run the schedule over *batch*: forward and backward in training with gradients, else forward alone.

        Args:
            batch: tensors with one row per sample: ``input_ids``, ``labels``, or what a train step of the script reads.

        Returns:
            ``loss``, and ``logits`` of the whole batch with ``return_logits``, on the last stage; `None` elsewhere.

        Raises:
            ValueError: no tensor, more tokens than the model has positions, or samples that are padded on the left.
        """
        from transformers.modeling_outputs import CausalLMOutput

        trains = self.training and torch.is_grad_enabled()
        rows, parts = self._micro_batches(batch)
        if trains:
            for piece in self.pieces:
                cast(Any, piece).zero_grad_buffer()
            for parameter in self.parameters():
                parameter.grad = None  # the last update left the buffer there
        several = len(self.pieces) > 1
        iterators: list[Iterator[Any]] = [iter(parts) for _ in self.pieces]
        with self._random.block():
            reports = get_forward_backward_func()(
                forward_step_func=self.train_step.forward_step,
                data_iterator=iterators if several else iterators[0],
                model=list(self.pieces) if several else self.pieces[0],
                num_microbatches=len(parts),
                seq_length=parts[0]["input_ids"].shape[1],
                micro_batch_size=parts[0]["input_ids"].shape[0],
                forward_only=not trains,
            )
        loss, logits = self._collected(reports, rows)
        if trains:
            self.loss, self.overflowed = loss, None
        return CausalLMOutput(loss=loss, logits=logits)

    def _micro_batches(self, batch: Mapping[str, Any]) -> tuple[int, list[dict[str, Tensor]]]:
        """Return the samples of *batch*, and it in equal micro batches: it is filled up from its start."""
        tensors = {name: one for name, one in batch.items() if isinstance(one, Tensor)}
        if "input_ids" not in tensors:
            raise ValueError(f"Megatron-LM's models need input_ids; the batch has {', '.join(batch) or 'nothing'}")
        tensors = self.layout.checked(tensors)
        rows, length = tensors["input_ids"].shape
        count = self.plugin.num_micro_batches
        if missing := -rows % count:
            fill = torch.arange(missing, device=tensors["input_ids"].device) % rows
            tensors = {name: torch.cat([tensor, tensor[fill]]) for name, tensor in tensors.items()}
        if self.plugin.sequence_parallelism and (gap := -length % self.plugin.tp_degree):
            tensors = _lengthened(tensors, gap)
        parts = {name: tensor.to(self.device).chunk(count) for name, tensor in tensors.items()}
        return rows, [{name: part[index] for name, part in parts.items()} for index in range(count)]

    def _collected(self, reports: list[dict[str, Any]], rows: int) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss, which every stage learns, and the logits."""
        loss = torch.zeros((), device=self.device)
        logits = None
        if reports:
            losses = [next(iter(report.values())) for report in reports]
            loss = torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()
            if "logits" in reports[0]:
                logits = torch.cat([report["logits"] for report in reports])[:rows]
        stages = parallel_state.get_pipeline_model_parallel_group()
        if dist.get_world_size(stages) > 1:
            dist.broadcast(loss, dist.get_process_group_ranks(stages)[-1], group=stages)
        return loss, logits

    # ---- states

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the whole weights under Transformers' names, on the CPU of every process. Collective.

        They are float32, those that the optimizer trains where the model computes in 16 bits.
        """
        take = (lambda parameter: parameter) if self.masters is None else self.masters.read
        return states.gathered(self.layout, self.bare, take)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole weights, as `state_dict` and a Transformers model give them, on every process.

        Raises:
            RuntimeError: names or sizes differ.
        """
        if (wrong := states.problem(self.layout, state_dict)) is not None:
            raise RuntimeError(f"the weights do not fit the model: {wrong}")

        def put(parameter: nn.Parameter, part: Tensor) -> None:
            if self.masters is not None:
                self.masters.write(parameter, part)
                return
            with torch.no_grad():
                parameter.copy_(part)

        states.scattered(self.layout, self.bare, state_dict, put)
        return nn.modules.module._IncompatibleKeys([], [])


def _lengthened(tensors: Mapping[str, Tensor], gap: int) -> dict[str, Tensor]:
    """Return *tensors* with *gap* more tokens at the end, which do not count."""
    labels = tensors.get("labels", tensors["input_ids"])
    inputs = {**tensors, "labels": labels}
    width = tensors["input_ids"].shape[1]
    return {
        name: nn.functional.pad(tensor, (0, gap), value=-100 if name == "labels" else 0)
        if tensor.ndim > 1 and tensor.shape[1] == width
        else tensor
        for name, tensor in inputs.items()
    }
