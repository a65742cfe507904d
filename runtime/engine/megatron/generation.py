"""Generating text with a GPT that Megatron-LM trains, over its tensor parallel processes and stages.

Each new token is one pass of all tokens through the stages; nothing is kept between passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from orc.runtime.engine.megatron.library import common_seed

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.engine.megatron.plugin import MegatronLMPlugin


class Generating(nn.Module):
    """A `MegatronModel`, as far as generating needs it.

    Attributes:
        config: that of the Transformers model.
        ctx: the run.
        plugin: how the model is split.
        device: where this process computes.
        pieces: those of this process.
    """

    config: Any
    ctx: RunContext
    plugin: MegatronLMPlugin
    device: torch.device
    pieces: nn.ModuleList

    def megatron_generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        num_beams: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        top_p_decay: float = 0.0,
        top_p_bound: float = 0.0,
        length_penalty: float = 1.0,
        add_BOS: bool = False,
        random_seed: int | None = None,
    ) -> Tensor:
        """Return the prompts *input_ids* with what follows them, the same on every process. Collective.

        The likeliest token follows, unless *top_k* or *top_p* let it be drawn, or *num_beams* search.

        Args:
            input_ids: prompts [batch, sequence], shorter ones padded on the right.
            attention_mask: 0 for padding.
            max_new_tokens: most new tokens of each prompt.
            max_length: the same, with the prompt's tokens; the model's positions when nobody says either.
            num_beams: hypotheses that a search keeps; for a single prompt.
            temperature: what scores are divided by before one is drawn.
            top_k: draw among so many of the likeliest tokens.
            top_p: draw among the likeliest tokens that have this much of the probability together.
            top_p_decay: factor of *top_p* with each new token.
            top_p_bound: what *top_p* does not fall below.
            length_penalty: power of the length that a hypothesis's score is divided by.
            add_BOS: put the token that begins a text before each prompt.
            random_seed: of what is drawn; one that all processes share when nobody says it.

        Raises:
            ValueError: settings that do not go together, or prompts that are too long or padded on the left.
        """
        _check(self, top_k=top_k, top_p=top_p, num_beams=num_beams, rows=len(input_ids))
        tokens = input_ids.to(self.device)
        lengths = torch.full((len(tokens),), tokens.shape[1], device=self.device)
        if attention_mask is not None:
            mask = attention_mask.to(self.device)
            if bool((mask[:, 1:] > mask[:, :-1]).any()):
                raise ValueError("megatron_generate: prompts are padded on the left; pad them on the right")
            lengths = mask.sum(1)
        if add_BOS:
            tokens = torch.nn.functional.pad(tokens, (1, 0), value=self.config.bos_token_id)
            lengths = lengths + 1
        positions = self.config.n_positions
        ends = (
            lengths + max_new_tokens
            if max_new_tokens is not None
            else torch.full_like(lengths, max_length or positions)
        )
        if int(ends.max()) > positions or int(lengths.min()) < 1:
            raise ValueError(
                f"megatron_generate: prompts of {lengths.tolist()} tokens and new ones up to {ends.tolist()} do not "
                f"fit the model's {positions} positions"
            )
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                if num_beams > 1:
                    return _searched(self, tokens[:, : int(lengths)], int(ends), num_beams, length_penalty)
                seed = common_seed(self.ctx) if random_seed is None else random_seed
                choose = _Choice(temperature, top_k, top_p, top_p_decay, top_p_bound, seed)
                return _continued(self, tokens, lengths, ends, choose)
        finally:
            self.train(training)


def _check(model: Generating, *, top_k: int, top_p: float, num_beams: int, rows: int) -> None:
    """Check that *model* can generate so.

    Raises:
        ValueError: it cannot; the text says why.
    """
    plugin = model.plugin
    if model.config.model_type != "gpt2":
        raise ValueError(f"megatron_generate is for gpt2, and the model is of kind {model.config.model_type}")
    if (plugin.data_parallel_size or 1) > 1:
        raise ValueError(
            f"megatron_generate needs one copy of the model, and there are {plugin.data_parallel_size}: start "
            "tp_degree x pp_degree processes"
        )
    for name in ("sequence_parallelism", "recompute_activations", "num_layers_per_virtual_pipeline_stage"):
        if getattr(plugin, name):
            raise ValueError(
                f"megatron_generate is not possible with {name}: set it to {type(getattr(plugin, name))()}"
            )
    if top_k and top_p:
        raise ValueError("megatron_generate: give top_k or top_p, not both")
    if top_k < 0 or not 0 <= top_p <= 1:
        raise ValueError(f"megatron_generate: top_k={top_k} must be at least 0, and top_p={top_p} between 0 and 1")
    if num_beams > 1 and (rows != 1 or top_k or top_p):
        raise ValueError("megatron_generate: beams search one prompt at a time, and draw nothing (no top_k, no top_p)")


def _continued(model: Generating, tokens: Tensor, lengths: Tensor, ends: Tensor, choose: _Choice) -> Tensor:
    """Return *tokens* of *lengths* with what follows them, up to *ends*; shorter ones are filled up."""
    stop = model.config.eos_token_id
    fill = 0 if stop is None else stop
    total = int(ends.max())
    tokens = torch.nn.functional.pad(tokens, (0, max(0, total - tokens.shape[1])), value=fill)
    done = torch.zeros_like(lengths, dtype=torch.bool)
    for place in range(int(lengths.min()), total):
        chosen = choose(next_scores(model, tokens[:, :place]))
        begun, open_ = lengths <= place, ~done & (ends > place)
        tokens[:, place] = torch.where(begun, torch.where(open_, chosen, fill), tokens[:, place])
        done |= begun & (~open_ | (chosen == stop if stop is not None else False))
        if bool(done.all()):
            return tokens[:, : place + 1]
    return tokens


def _searched(model: Generating, prompt: Tensor, end: int, beams: int, penalty: float) -> Tensor:
    """Return *prompt* with its best continuation of at most *end* tokens, of *beams* that are kept."""
    stop, begin = model.config.eos_token_id, prompt.shape[1]
    tokens, scores = prompt, torch.zeros(1, device=prompt.device)
    finished: list[tuple[float, Tensor]] = []
    for place in range(begin, end):
        sums = scores[:, None] + next_scores(model, tokens).log_softmax(-1)
        vocabulary = sums.shape[-1]
        best, index = sums.flatten().topk(min(2 * beams, sums.numel()))
        tokens = torch.cat([tokens[index // vocabulary], (index % vocabulary)[:, None]], 1)
        ended = tokens[:, -1] == stop if stop is not None else torch.zeros_like(index, dtype=torch.bool)
        for score, beam in zip(best[:beams][ended[:beams]], tokens[:beams][ended[:beams]], strict=True):
            finished.append((float(score) / (place + 1 - begin) ** penalty, beam))
        tokens, scores = tokens[~ended][:beams], best[~ended][:beams]
        finished = sorted(finished, key=lambda pair: pair[0], reverse=True)[:beams]
        if len(finished) == beams and finished[-1][0] >= float(scores[0]) / (place + 1 - begin) ** penalty:
            break
    else:
        length = max(1, end - begin)
        finished += [(float(score) / length**penalty, beam) for score, beam in zip(scores, tokens, strict=True)]
    return max(finished, key=lambda pair: pair[0])[1][None]


class _Choice:
    """Choice of the next tokens from their scores: the likeliest, or one that is drawn, alike on all processes."""

    def __init__(self, temperature: float, top_k: int, top_p: float, decay: float, bound: float, seed: int) -> None:
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._decay, self._bound = decay, bound
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, scores: Tensor) -> Tensor:
        if not self._top_k and not self._top_p:
            return scores.argmax(-1)
        ordered, index = (scores.float().cpu() / self._temperature).sort(-1, descending=True)
        if self._top_k:
            ordered[:, self._top_k :] = -torch.inf
        else:
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
            before[:, 0] = 0
            ordered[before >= self._top_p] = -torch.inf
            if self._decay:
                self._top_p = max(self._top_p * self._decay, self._bound, 1e-9)
        drawn = torch.multinomial(ordered.softmax(-1), 1, generator=self._generator)
        return index.gather(1, drawn)[:, 0].to(scores.device)


def next_scores(model: Generating, tokens: Tensor) -> Tensor:
    """Return the scores [batch, vocabulary] of the token after *tokens*, on every process. Collective."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

    def forward_step(data_iterator: Iterator[Any], piece: Any) -> tuple[Any, Any]:
        return piece(tokens, positions, None), _last_scores

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(()),
        model=model.pieces[0],
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    width = model.config.vocab_size
    scores = outputs[0][..., :width].float().contiguous() if outputs else tokens.new_empty(len(tokens), width).float()
    stages = parallel_state.get_pipeline_model_parallel_group()
    if dist.get_world_size(stages) > 1:
        dist.broadcast(scores, dist.get_process_group_ranks(stages)[-1], group=stages)
    return scores


def _last_scores(output: Tensor, non_loss_data: bool = True) -> Tensor:
    """Return the scores after the last token, of the whole vocabulary."""
    return gather_from_tensor_model_parallel_region(output[:, -1].contiguous())  # type: ignore[no-any-return]
