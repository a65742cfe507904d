"""Sequence parallelism: the processes along ``sp`` share out the tokens of each sequence, and in attention the heads.

Loaders yield pieces of sequences. In attention an all-to-all exchanges them for whole sequences of some of the heads,
and another one exchanges them back.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.base import Parallelizer, Request
from orc.runtime.parallel.pieces import (
    IGNORED,
    Attend,
    Piece,
    check_model,
    hides_padding,
    refuse_packed,
    repeated,
    watch_model,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from orc.runtime.core.context import RunContext

KIND = "sequence parallelism"
_TORCH = functional.scaled_dot_product_attention
padded: WeakSet[RunContext] = WeakSet()  # runs whose batches have padding, which only causal attention leaves out


class SequenceParallel(Parallelizer):
    """Models that compute a piece of every sequence that their loaders yield. Parameters stay, as those of replicas."""

    name = "sequence"
    order = 200
    conflicts: tuple[str, ...] = ("xla",)
    serves: tuple[str, ...] = ("sp",)

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """Return whether there are several processes along ``sp``."""
        return ctx.topology.size("sp") > 1

    def check(self, model: nn.Module, ctx: RunContext, request: Request) -> None:
        """Refuse what this back end does not compute, and heads that cannot be shared out."""
        if request.options.get("sp_backend") == "deepspeed":
            raise ContextError(
                f"{KIND}: sp_backend='deepspeed' (the default) is computed by DeepSpeed: pass deepspeed_plugin="
                "DeepSpeedPlugin(...) too, or choose ParallelismConfig(sp_backend='torch'), which needs none"
            )
        handler = request.options.get("sp")
        asked = "sdpa" if handler is None else handler.sp_attn_implementation
        if asked != "sdpa":
            raise ContextError(
                f"{KIND}: sp_attn_implementation={asked!r} is not computed by sp_backend='torch', which has 'sdpa'"
            )
        check_heads(model, ctx.topology.size("sp"), ctx.topology.size("tp"))
        check_model(model, KIND)

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Let the attention of *model* go over all pieces, in its forward and backward."""
        ranks = ctx.topology.size("sp")
        watch_model(model)
        group = ctx.topology.group("sp")
        assert group is not None
        _Region(ctx, group, _by_heads(group, ranks)).watch(model)
        return model

    def batch_cut(self, ctx: RunContext, options: Mapping[str, Any]) -> SequenceCut | None:
        """Return what cuts the batches of loaders to this rank's piece; `None` with one process along ``sp``."""
        ranks = ctx.topology.size("sp")
        if ranks == 1:
            return None
        handler = options.get("sp")
        fixed = None if handler is None or handler.sp_seq_length_is_variable else handler.sp_seq_length
        return SequenceCut(ctx.topology.place("sp"), ranks, fixed, lambda: padded.add(ctx))


def check_heads(model: nn.Module, ranks: int, cut: int = 1) -> None:
    """Raise `ContextError` where *ranks* cannot share out a *cut*-th of the heads of *model*."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        of_keys = getattr(config, "num_key_value_heads", None) or heads
        _refuse_heads(heads // cut, max(of_keys // cut, 1), ranks)


def _refuse_heads(heads: int, of_keys: int, ranks: int) -> None:
    if heads % ranks:
        raise ContextError(f"{KIND}: {heads} attention heads cannot be shared out to sp_size={ranks} processes equally")
    if of_keys % ranks and ranks % of_keys:
        raise ContextError(
            f"{KIND}: {of_keys} heads of keys and values can neither be shared out to sp_size={ranks} processes nor "
            "repeated for them"
        )


def tokens_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the input of *model* that has tokens along dimension 1. Raises `ContextError` where there is none."""
    named = [kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    for tensor in (*named, *args, *kwargs.values()):
        if isinstance(tensor, Tensor) and tensor.ndim > 1:
            return tensor
    raise ContextError(f"{KIND}: {type(model).__name__} was given no tensor with tokens along dimension 1")


class _Region:
    """Forward and backward of a model, in which its piece is in force."""

    def __init__(self, ctx: RunContext, group: ProcessGroup, attend: Attend) -> None:
        self.ctx, self.place, self.ranks, self.attend = ctx, ctx.topology.place("sp"), group.size(), attend
        self._whole = WholeSequences(group)
        self._piece: Piece | None = None

    def watch(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = tokens_of(model, args, kwargs)
        self._whole.refuse(tokens, model.training)
        here = tokens.shape[1]
        positions = torch.arange(self.place * here, (self.place + 1) * here, device=tokens.device)
        causal = self.ctx in padded
        self._piece = Piece(KIND, positions, here * self.ranks, self.ranks, self.attend, causal=causal)
        self._piece.begin()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        piece = self._piece
        if piece is None or Piece.current is not piece:
            return
        piece.end()
        for leaf in torch.utils._pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: _during_backward(piece))


def _during_backward(piece: Piece) -> None:
    """Let *piece* be in force until the end of this backward, which may compute parts of the forward again."""
    if Piece.current is None:
        piece.begin(backward=True)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: piece.end())


def _by_heads(group: ProcessGroup, ranks: int) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        heads, of_keys = query.shape[1], key.shape[1]
        _refuse_heads(heads, of_keys, ranks)
        if of_keys % ranks:
            key, value = (tensor.repeat_interleave(ranks // of_keys, 1) for tensor in (key, value))
        query, key, value = (_exchange(tensor, 1, 2, group, ranks) for tensor in (query, key, value))
        key, value = repeated(query, key, value, enable_gqa)
        return _exchange(_TORCH(query, key, value, **options), 2, 1, group, ranks)

    return attend


def _exchange(tensor: Tensor, cut: int, join: int, group: ProcessGroup, ranks: int) -> Tensor:
    """Return *tensor*, cut along one dimension for the ranks of *group*, with theirs joined along the other."""
    parts = torch.stack(tensor.chunk(ranks, cut))
    received: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return torch.cat(received.unbind(0), join)


class _AllToAll(torch.autograd.Function):
    """Part r of the first dimension to rank r; gradients go back. torch's own has two names, depending on its age."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        returned = torch.empty_like(gradient)
        dist.all_to_all_single(returned, gradient, group=ctx.group)
        return returned, None


# ---- batches


class SequenceCut:
    """Cut of every batch to the *place*-th of *ranks* pieces of its sequences; *length*: tokens that they must have.

    Batches are mappings with ``input_ids``: tensors that are as long along dimension 1 are cut. ``labels`` come as
    ``shift_labels``, of which each belongs to the token before it; ``position_ids`` are added. A mask is left out, and
    *note_padding* called where it hides something.
    """

    def __init__(
        self, place: int, ranks: int, length: int | None = None, note_padding: Callable[[], None] = lambda: None
    ) -> None:
        self.place, self.ranks, self.length, self._note_padding = place, ranks, length, note_padding

    def __call__(self, batch: Any) -> Any:
        """Return the piece of *batch*.

        Raises:
            ContextError: it has no ``input_ids``, a length that cannot be cut, a mask, or packed sequences.
        """
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise ContextError(
                f"{KIND} cuts batches that are mappings with input_ids of shape (batch, tokens), not a "
                f"{type(batch).__name__}: let the collate_fn make such"
            )
        length = tokens.shape[1]
        if self.length is not None and length != self.length:
            raise ContextError(f"{KIND}: a batch with sequences of {length} tokens, and sp_seq_length={self.length}")
        if length % self.ranks:
            raise ContextError(
                f"{KIND}: sequences of {length} tokens cannot be cut into sp_size={self.ranks} equal pieces; pad them "
                f"to a multiple of {self.ranks} ({-(-length // self.ranks) * self.ranks})"
            )
        whole = dict(batch)
        if (mask := whole.pop("attention_mask", None)) is not None and hides_padding(mask, KIND):
            self._note_padding()
        if (given := whole.get("position_ids")) is not None:
            refuse_packed(given, KIND)
        whole["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[:2])
        if isinstance(labels := whole.pop("labels", None), Tensor):
            whole["shift_labels"] = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        return {name: self._piece(value, length) for name, value in whole.items()}

    def _piece(self, value: Any, length: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
            return value
        return value.chunk(self.ranks, 1)[self.place].contiguous()


class WholeSequences:
    """Check that the first batch of training, and the first of evaluation, came as pieces to the ranks of *group*."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._seen: set[bool] = set()

    @torch.no_grad()
    def refuse(self, tokens: Tensor, training: bool) -> None:
        """Raise `ContextError` where all ranks have the same *tokens*; collective. Such as are all alike pass."""
        if training in self._seen or torch.compiler.is_compiling():
            return
        self._seen.add(training)
        flat = tokens.detach().flatten().double()
        ramp = torch.arange(len(flat), device=flat.device, dtype=flat.dtype)
        alike = (flat == flat[:1]).all().double()
        said = torch.stack([flat.sum(), flat @ ramp, torch.full_like(alike, len(flat)), alike])
        most = torch.cat([said, -said])
        dist.all_reduce(most, dist.ReduceOp.MAX, self._group)
        if bool((most[:4] == -most[4:]).all()) and not bool(alike):
            raise ContextError(
                f"{KIND}: the processes along sp were given the same tokens, so nobody has cut these "
                "sequences: take batches from a prepared loader, or cut them along dimension 1: "
                "tokens.chunk(sp_size, 1)[accelerator.torch_device_mesh.get_local_rank('sp')]"
            )


PARALLELIZER = SequenceParallel()
