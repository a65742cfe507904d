"""Train steps of BERT and of T5: how a micro batch, as Transformers has it, becomes a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from orc.runtime.engine.megatron.steps import TrainStep, avg_losses_across_data_parallel_group
from orc.runtime.parallel.pieces import IGNORED


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
