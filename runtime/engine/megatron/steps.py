"""Train steps: how a micro batch becomes a loss. Scripts derive from `GPTTrainStep` to compute a loss of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_IGNORED = -100  # labels that do not count, as Transformers marks them


class AbstractTrainStep(ABC):
    """Contract of a train step: three functions that Megatron-LM's schedules call.

    Args:
        name: of the step, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def get_batch_func(self, megatron_args: Any = None) -> Callable[..., Any]:
        """Return the function that takes the next micro batch out of an iterator."""

    @abstractmethod
    def get_loss_func(self) -> Callable[..., Any]:
        """Return the function of the model's output; its result is the loss and a dictionary of values to report."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function of an iterator and a piece of the model; its result is the output and a loss function."""


class GPTTrainStep(AbstractTrainStep):
    """Train step of a GPT: the mean loss over the tokens of a micro batch that count.

    Derive from it and override `get_loss_func` or `get_forward_step_func`, and name the class in
    ``MegatronLMPlugin.custom_train_step_class``.

    Args:
        megatron_args: the plug-in in force.
        kwargs: ``custom_train_step_kwargs`` of the plug-in.

    Attributes:
        get_batch: function of an iterator: tokens, labels, loss mask, attention mask and positions of a micro batch.
        loss_func: what `get_loss_func` returns.
        forward_step: what `get_forward_step_func` returns.
    """

    def __init__(self, megatron_args: Any = None, **kwargs: Any) -> None:
        super().__init__("GPTTrainStep")
        self.megatron_args = megatron_args
        self.return_logits = bool(getattr(megatron_args, "return_logits", False))
        self.get_batch = getattr(megatron_args, "custom_get_batch_function", None) or self.get_batch_func()
        self.loss_func = getattr(megatron_args, "custom_loss_function", None) or self.get_loss_func()
        self.forward_step = self.get_forward_step_func()

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


class _Unserved(AbstractTrainStep):
    """Seam: the train step of a model that this engine does not build; making one says so."""

    kind = ""

    def __init__(self, megatron_args: Any = None, **kwargs: Any) -> None:
        super().__init__(type(self).__name__)
        raise NotImplementedError(
            f"{type(self).__name__}: {self.kind} is not made into a Megatron-LM model by this version, which has GPT-2 "
            "alone; derive from AbstractTrainStep or GPTTrainStep"
        )

    def get_batch_func(self, megatron_args: Any = None) -> Callable[..., Any]:
        """Refused. Raises `NotImplementedError`."""
        raise NotImplementedError

    def get_loss_func(self) -> Callable[..., Any]:
        """Refused. Raises `NotImplementedError`."""
        raise NotImplementedError

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Refused. Raises `NotImplementedError`."""
        raise NotImplementedError


class BertTrainStep(_Unserved):
    """Seam: the train step of BERT, whose Megatron-LM model this version does not build; making one raises."""

    kind = "megatron-bert"


class T5TrainStep(_Unserved):
    """Seam: the train step of T5, whose Megatron-LM model this version does not build; making one raises."""

    kind = "t5"


def next_batch(data_iterator: Iterator[Any]) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """Return tokens, labels, loss mask, attention mask and positions of the next micro batch, [batch, sequence] each.

    The label of a token is the token after it. Attention is causal: there is no mask to pass.
    """
    batch = next(data_iterator)
    tokens = batch["input_ids"]
    given = batch.get("labels")
    given = tokens if given is None else given
    labels = torch.nn.functional.pad(given[:, 1:], (0, 1), value=_IGNORED)
    mask = labels != _IGNORED
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

    def gather(one: Tensor) -> Tensor:
        one = one.reshape(1) if one.ndim == 0 else one.contiguous()
        parts = [torch.empty_like(one) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, one, group=group)
        return torch.cat(parts)

    return recursively_apply(gather, tensor)
