"""Train steps: how a micro batch becomes a loss. Scripts derive from `GPTTrainStep` to compute a loss of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orc.runtime.parallel.pieces import IGNORED


class AbstractTrainStep(ABC):
    """Contract of a train step: three functions that Megatron-LM's schedules call.

    Args:
        name: of the step, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def get_batch_func(self, megatron_args: Any = None) -> Callable[..., Any]:
        """Return the function that takes the next micro batch out of an iterator.

        Args:
            megatron_args: accepted as documented; the settings are the plug-in's.
        """

    @abstractmethod
    def get_loss_func(self) -> Callable[..., Any]:
        """Return the function of the model's output; its result is the loss and a dictionary of values to report."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function of an iterator and a piece of the model; its result is the output and a loss function."""


class TrainStep(AbstractTrainStep):
    """Train step of one kind of model, with what the plug-in puts in its functions' place.

    Args:
        megatron_args: the plug-in in force.
        kwargs: ``custom_train_step_kwargs`` of the plug-in.

    Attributes:
        config: of the Transformers model.
        get_batch: function of an iterator: what `forward_step` takes from a micro batch.
        loss_func: what `get_loss_func` returns.
        forward_step: what `get_forward_step_func` returns.
    """

    def __init__(self, megatron_args: Any = None, **kwargs: Any) -> None:
        super().__init__(type(self).__name__)
        self.megatron_args = megatron_args
        self.config = getattr(megatron_args, "model_config", None)
        self.return_logits = bool(getattr(megatron_args, "return_logits", False))
        self.get_batch = getattr(megatron_args, "custom_get_batch_function", None) or self.get_batch_func()
        self.loss_func = getattr(megatron_args, "custom_loss_function", None) or self.get_loss_func()
        self.forward_step = self.get_forward_step_func()


class GPTTrainStep(TrainStep):
    """Train step of a GPT: the mean loss over the tokens of a micro batch that count.

    Derive from it and override `get_loss_func` or `get_forward_step_func`, and name the class in
    ``MegatronLMPlugin.custom_train_step_class``; `get_batch` gives tokens, labels, loss mask, attention mask and
    positions of a micro batch.
    """

    def get_batch_func(self, megatron_args: Any = None) -> Callable[..., Any]:
        """Return a function of an iterator over micro batches as Transformers has them (``input_ids``, ``labels``)."""
        return next_batch

    def get_loss_func(self) -> Callable[..., Any]:
        """Return a function of the loss mask and the losses [batch, sequence]."""

        def loss_func(loss_mask: Tensor, output_tensor: Any) -> tuple[Tensor, dict[str, Any]]:
            output_tensor, logits = output_tensor if isinstance(output_tensor, tuple) else (output_tensor, None)
            mask = loss_mask.reshape(-1).float()
            loss = (output_tensor.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1)
            report: dict[str, Any] = {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}
            return loss, report if logits is None else {**report, "logits": logits}

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return a function of an iterator and a piece of the model."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            if not self.return_logits:
                output = model(tokens, position_ids, attention_mask, labels=labels)
            else:
                output = with_logits(model, tokens, position_ids, attention_mask, labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


def next_batch(data_iterator: Iterator[Any]) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """Return tokens, labels, loss mask, attention mask and positions of the next micro batch, [batch, sequence] each.

    The label of a token is the token after it; batches with a ``loss_mask`` have such labels already. Attention is
    causal: there is no mask to pass.
    """
    batch = next(data_iterator)
    tokens = batch["input_ids"]
    given = batch.get("labels")
    given = tokens if given is None else given
    if "loss_mask" in batch:  # of an indexed dataset
        labels, mask = given, batch["loss_mask"].bool()
    else:
        labels = torch.nn.functional.pad(given[:, 1:], (0, 1), value=IGNORED)
        mask = labels != IGNORED
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return tokens, labels.masked_fill(~mask, 0), mask, None, positions


def with_logits(model: Any, tokens: Tensor, positions: Tensor, attention_mask: Any, labels: Tensor) -> Any:
    """Return losses and logits of the last stage's piece *model*; of any other its output."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    piece = model
    while hasattr(piece, "module"):  # what averages gradients and converts to half precision
        piece = piece.module
    output = model(tokens, positions, attention_mask)
    if not piece.post_process:
        return output
    losses = piece.compute_language_model_loss(labels, output.transpose(0, 1).contiguous())
    logits = gather_from_tensor_model_parallel_region(output.detach())[..., : piece.vocabulary]
    return losses, logits


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return the *losses*, one number each, as one tensor of their means over the data parallel processes. Collective.

    They carry no gradient.
    """
    from megatron.core import parallel_state

    joined = torch.cat([loss.detach().clone().reshape(1) for loss in losses])
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(joined, group=group)
    joined /= dist.get_world_size(group)
    return joined


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return *tensor* (any nesting) of all data parallel processes, joined along the first dimension. Collective."""
    from megatron.core import parallel_state

    from orc.runtime.collectives.tree import recursively_apply

    group = parallel_state.get_data_parallel_group()

    def gather(tensor: Tensor) -> Tensor:
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return torch.cat(parts)

    return recursively_apply(gather, tensor)
