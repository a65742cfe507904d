"""Sequence parallelism by DeepSpeed (Ulysses): models of Transformers that compute pieces of sequences.

Attention is DeepSpeed's own, `UlyssesSPAttentionHF`; the groups that it and ZeRO ask for are those of the run's layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.pieces import Piece, inputs_of_piece, is_transformers_model
from orc.runtime.parallel.sequence import KIND, WholeSequences, check_heads, padded, tokens_of

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.parallelism import ParallelismConfig
    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin

_PREFIX = "ulysses_"  # of the names of attention that Transformers knows DeepSpeed's by


class Groups:
    """Groups of a run with sequences in pieces, in the form in which DeepSpeed requests them (its ``mpu``).

    Parameters, gradients and optimizer states are cut over all ranks, those of one sequence included.
    """

    initialize_sequence_parallel = None  # its name tells DeepSpeed that there is no model parallelism beside

    def __init__(self, ctx: RunContext) -> None:
        topology = ctx.topology
        self._pieces = (topology.group("sp"), topology.size("sp"), topology.place("sp"))
        self._all = (ctx.require_group(KIND), ctx.world_size, ctx.rank)

    def get_sequence_parallel_group(self) -> Any:
        """Return the ranks that share each sequence."""
        return self._pieces[0]

    def get_sequence_parallel_world_size(self) -> int:
        """Return their number."""
        return self._pieces[1]

    def get_sequence_parallel_rank(self) -> int:
        """Return this one's place among them."""
        return self._pieces[2]

    def get_sequence_data_parallel_group(self) -> Any:
        """Return the ranks over which ZeRO cuts."""
        return self._all[0]

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return their number."""
        return self._all[1]

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this one's place among them."""
        return self._all[2]

    def get_model_parallel_rank(self) -> int:
        """Return 0: layers are whole."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """Return 1: layers are whole."""
        return 1


def check(model: Any, plugin: DeepSpeedPlugin, ctx: RunContext, config: ParallelismConfig | None) -> str | None:
    """Return the attention around which *model* computes pieces of sequences; `None` where it computes whole ones.

    Raises:
        ContextError: it cannot; the same on every rank.
    """
    ranks = ctx.topology.size("sp")
    if ranks == 1:
        return None
    if config is None or config.sp_backend != "deepspeed":
        raise ContextError(
            f"{KIND}: sp_backend='torch' does not go together with DeepSpeed's engine: choose sp_backend='deepspeed', "
            "or leave deepspeed_plugin out"
        )
    if not is_transformers_model(model):
        raise ContextError(
            f"{KIND}: DeepSpeed computes it for models of Transformers, and this is a {type(model).__name__}: choose "
            "sp_backend='torch' and leave deepspeed_plugin out"
        )
    stage = plugin.get_value("zero_optimization.stage", 0)
    if stage not in (1, 2, 3):
        raise ContextError(f"{KIND}: DeepSpeed computes it with ZeRO stage 1, 2 or 3, and the stage is {stage}")
    handler = config.sp_handler
    wanted = "sdpa" if handler is None else str(handler.sp_attn_implementation)
    there = model.config._attn_implementation
    if there not in (wanted, _PREFIX + wanted):
        raise ContextError(
            f"{KIND}: sp_attn_implementation={wanted!r}, and {type(model).__name__} has attn_implementation={there!r}: "
            f"load the model with attn_implementation={wanted!r}"
        )
    check_heads(model, ranks)
    _attention_class()
    return wanted


def apply(model: Any, ctx: RunContext, core: str) -> Groups:
    """Let *model* compute pieces of sequences by the attention *core*; return the groups for its engine; collective."""
    from transformers import AttentionInterface, AttentionMaskInterface

    groups, name = Groups(ctx), _PREFIX + core
    AttentionInterface.register(name, _attention(core, groups, ctx))
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # of which Transformers only warns
        raise ContextError(f"{KIND}: {type(model).__name__} does not let its attention be replaced")

    whole = WholeSequences(groups.get_sequence_parallel_group())

    def inputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = tokens_of(model, args, kwargs)
        whole.refuse(tokens, model.training)
        here, ranks, place = tokens.shape[1], *groups._pieces[1:]
        positions = torch.arange(place * here, (place + 1) * here, device=tokens.device)
        piece = Piece(KIND, positions, here * ranks, ranks, torch.nn.functional.scaled_dot_product_attention)
        return (), inputs_of_piece(model, args, kwargs, piece)

    model.register_forward_pre_hook(inputs, with_kwargs=True)
    return groups


def forget() -> None:
    """Let the next engine have no groups of sequences: it would find those of an earlier one."""
    module: Any = sys.modules.get("deepspeed.utils.groups")
    if isinstance(getattr(module, "mpu", None), Groups):
        module.mpu = None


def average(engine: Any) -> None:
    """Let *engine* average gradients over the pieces of a sequence, as over all losses.

    DeepSpeed sums them with ZeRO stages 1 and 2, and averages them with stage 3, except where it does not scatter.
    """
    for owner in (engine, engine.optimizer):
        if hasattr(owner, "sequence_parallel_size"):
            owner.sequence_parallel_size = 1


def _attention_class() -> Any:
    try:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    except ImportError as error:
        raise ContextError(
            f"{KIND}: this DeepSpeed has no UlyssesSPAttentionHF ({error}); install 0.18.2 or later"
        ) from None
    return UlyssesSPAttentionHF


def _attention(core: str, groups: Groups, ctx: RunContext) -> Callable[..., Any]:
    """Return DeepSpeed's attention around *core*, in the form that Transformers calls."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known: dict[tuple[int, ...], Any] = {}  # DeepSpeed has one object for each size of batches and heads

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        group, ranks, place = groups._pieces
        here, window = query.shape[2], kwargs.get("sliding_window")
        if window is not None and window < here * ranks and core == "sdpa":
            raise ContextError(
                f"{KIND}: {type(module).__name__} attends to a window of {window} tokens; sequences in pieces have "
                f"attention over all {here * ranks}"
            )
        if ctx in padded and not getattr(module, "is_causal", True):
            raise ContextError(f"{KIND}: attention that is not causal over batches with padding, which it would see")
        if kwargs.get("position_ids") is None:
            positions = torch.arange(place * here, (place + 1) * here, device=query.device)
            kwargs["position_ids"] = positions.expand(len(query), here).contiguous()
        sizes = (len(query), query.shape[1], query.shape[3], key.shape[1])
        if sizes not in known:
            known[sizes] = _attention_class()(
                attn=ALL_ATTENTION_FUNCTIONS[core],
                batch_size=sizes[0],
                attn_head_count=sizes[1],
                attn_head_size=sizes[2],
                kv_head_count=sizes[3],
                num_hidden_layers=1,
                process_group=group,
                seq_length_is_variable=True,
            )
        return known[sizes](module, query, key, value, None, **kwargs)

    return attention


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: that of a piece would be wrong for the whole sequence, whose attention is causal without."""
    return
