"""Train steps: how a micro batch becomes a loss. Scripts derive from `GPTTrainStep` to compute a loss of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
        labels = F.pad(given[:, 1:], (0, 1), value=IGNORED)
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


class BertTrainStep(TrainStep):
    """Train step of a BERT: the mean loss of the masked words, and that of the classes of sequences.

    Derive from it and override `get_loss_func` or `get_forward_step_func`, and name the class in
    ``MegatronLMPlugin.custom_train_step_class``. A batch has ``input_ids``, ``labels`` and, where they are wanted,
    ``attention_mask``, ``token_type_ids`` and ``next_sentence_label``.
    """

    def get_batch_func(self, megatron_args: Any = None) -> Callable[..., Any]:
        """Return a function of an iterator: tokens, types, classes, loss mask, labels and padding mask."""
        return next_bert_batch

    def get_loss_func(self) -> Callable[..., Any]:
        """Return a function of the loss mask, the classes of the sequences and the model's output."""

        def loss_func(loss_mask: Tensor, sentence_order: Tensor | None, output: Any) -> tuple[Tensor, dict[str, Any]]:
            losses, classes = output
            found = []
            if losses.ndim == 2:
                mask = loss_mask.reshape(-1).float()
                found.append((losses.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1))
            if classes is not None and sentence_order is not None:
                found.append(F.cross_entropy(classes.float(), sentence_order.reshape(-1), ignore_index=IGNORED))
            loss = torch.stack(found).sum()
            return loss, {"loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return a function of an iterator and a piece of the model."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, types, sentence_order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, sentence_order)

        return forward_step


class T5TrainStep(TrainStep):
    """Train step of a T5: the mean loss over the labels of a micro batch that count.

    Derive from it as from `BertTrainStep`. A batch has ``input_ids``, ``labels`` and, where they are wanted,
    ``attention_mask`` and ``decoder_input_ids``.
    """

    def get_batch_func(self, megatron_args: Any = None) -> Callable[..., Any]:
        """Return a function of an iterator: tokens of encoder and decoder, loss mask, labels, and the three masks."""
        start = getattr(self.config, "decoder_start_token_id", None)
        fill = getattr(self.config, "pad_token_id", None) or 0
        return partial(next_t5_batch, start=fill if start is None else start, fill=fill)

    def get_loss_func(self) -> Callable[..., Any]:
        """Return a function of the loss mask and the losses [batch, sequence]."""

        def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
            mask = loss_mask.reshape(-1).float()
            loss = (output_tensor.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1)
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return a function of an iterator and the model."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, decoder_tokens, loss_mask, labels, mask, decoder_mask, cross_mask = self.get_batch(data_iterator)
            output = model(tokens, decoder_tokens, mask, decoder_mask, cross_mask, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


def next_bert_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
    """Return tokens, types, classes of sequences, loss mask, labels and padding mask of the next micro batch.

    The label of a token is its own. ``labels`` with one number per sample are classes of sequences.
    """
    batch = next(data_iterator)
    tokens = batch["input_ids"]
    types, padding_mask, labels = (batch.get(name) for name in ("token_type_ids", "attention_mask", "labels"))
    sentence_order = batch.get("next_sentence_label")
    if labels is not None and labels.ndim == 1:
        labels, sentence_order = None, labels
    mask = None if labels is None else labels != IGNORED
    return (
        tokens,
        torch.zeros_like(tokens) if types is None else types,
        sentence_order,
        mask,
        None if labels is None else labels.masked_fill(labels == IGNORED, 0),
        torch.ones_like(tokens) if padding_mask is None else padding_mask,
    )


def next_t5_batch(data_iterator: Iterator[Any], start: int = 0, fill: int = 0) -> tuple[Any, ...]:
    """Return the tokens of encoder and decoder, loss mask, labels and masks of the next micro batch.

    Without ``decoder_input_ids`` the decoder reads the labels, moved by one behind the token *start*. Masks are true
    where a key is hidden, and that of the decoder is causal in any case.
    """
    batch = next(data_iterator)
    tokens, labels = batch["input_ids"], batch["labels"]
    counted = labels != IGNORED
    decoder_tokens = batch.get("decoder_input_ids")
    if decoder_tokens is None:
        decoder_tokens = F.pad(labels[:, :-1].masked_fill(~counted[:, :-1], fill), (1, 0), value=start)
    hidden = {
        name: batch[name][:, None, None, :] < 0.5 if batch.get(name) is not None else None
        for name in ("attention_mask", "decoder_attention_mask")
    }
    mask, decoder_mask = hidden.values()
    return tokens, decoder_tokens, counted, labels.masked_fill(~counted, 0), mask, decoder_mask, mask


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
