"""Plans of tensor parallelism: which module is cut how, found, checked and turned into styles of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from orc.runtime.core.errors import ContextError
from orc.runtime.core.parsing import nearest

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from orc.runtime.core.parallelism import TorchTensorParallelConfig

# Names of styles: those of Transformers' plans, and what the same is called elsewhere.
STYLES = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "rowwise_rep",
    "embedding_rowwise",
    "embedding_colwise",
    "sequence_parallel",
    "sequence",
    "replicated_with_grad_allreduce",
)
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_heads", "n_kv_heads")
_HELP = (
    "give one: ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan={'layers.*.up': 'colwise', "
    "'layers.*.down': 'rowwise'})), or leave tp_size out"
)


def plan_of(model: nn.Module, handler: TorchTensorParallelConfig | None) -> Mapping[str, Any] | None:
    """Return the plan that *handler* gives for *model*, else the model's own (Transformers); `None` without one."""
    given = None if handler is None else handler.plan
    if given is not None:
        return given
    for name in ("tp_plan", "_tp_plan"):
        own = getattr(model, name, None)
        if isinstance(own, Mapping) and own:
            return own
    return None


def styles_of(model: nn.Module, handler: TorchTensorParallelConfig | None, size: int) -> dict[str, ParallelStyle]:
    """Return the style of each module of *model* that is cut over *size* ranks, by the module's name.

    Raises:
        ContextError: there is no plan, it fits no module or names a style that there is not, or *size* does not divide
            heads or a side of a matrix; the same on every rank.
    """
    plan = plan_of(model, handler)
    kind = type(model).__name__
    if plan is None:
        raise ContextError(f"tp_size={size}: {kind} has no plan of its own that says how its layers are cut; {_HELP}")
    own = handler is None or handler.plan is None
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        hit = [name for name in names if expression.fullmatch(name)]
        if not hit and not own:
            raise ContextError(f"plan: {pattern!r} is the name of no module of {kind}{nearest(pattern, names)}")
        for name in hit:
            styles[name] = _style(name, model.get_submodule(name), style, kind if own else None)
    if not styles:
        raise ContextError(f"tp_size={size}: the plan of {kind} fits none of its modules; {_HELP}")
    _refuse_uneven(model, styles, size)
    return styles


def _style(name: str, module: nn.Module, style: Any, owner: str | None) -> ParallelStyle:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    if isinstance(style, ParallelStyle):
        return style
    whose = f"the plan of {owner}" if owner else "plan"
    if style not in STYLES:
        other = f", or load the model with the styles of Transformers, or {_HELP}" if owner else ""
        raise ContextError(
            f"{whose}: {name} is {style!r}, which is no style of torch: choose from {', '.join(STYLES)}"
            f"{nearest(str(style), STYLES)}{other}"
        )
    if style in ("sequence_parallel", "sequence"):
        return SequenceParallel()
    if style == "replicated_with_grad_allreduce":  # a norm over each head: the heads of this rank are its part
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ContextError(f"{whose}: {name} is {style!r}, but a {type(module).__name__} has no matrix to cut")
    if style in ("rowwise_split_input", "rowwise_rep", "embedding_rowwise"):
        return RowwiseParallel(input_layouts=Replicate())
    if style in ("colwise_gather_output", "colwise_rep", "embedding_colwise"):
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if style == "colwise" else RowwiseParallel()


def cut_dimension(module: nn.Module, style: Any) -> int | None:
    """Return the dimension along which *style* cuts the weight of *module*; `None` if it is not cut."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns, rows = isinstance(style, ColwiseParallel), isinstance(style, RowwiseParallel)
    if not (columns or rows) or not isinstance(module, (nn.Linear, nn.Embedding)):
        return None
    return 0 if columns == isinstance(module, nn.Linear) else 1


def _refuse_uneven(model: nn.Module, styles: Mapping[str, ParallelStyle], size: int) -> None:
    """Raise `ContextError` that names every module that cannot be cut into *size* equal parts."""
    problems = []
    holders: dict[str, Any] = {name: module for name, module in model.named_modules() if _cut_below(name, styles)}
    config = getattr(model, "config", None)
    for name, holder in {"config": config, **holders}.items():
        for attribute in _HEADS:
            heads = getattr(holder, attribute, None)
            if isinstance(heads, int) and heads % size:
                problems.append(f"{name}.{attribute} is {heads}" if name else f"{attribute} is {heads}")
    for name, style in styles.items():
        module = model.get_submodule(name)
        dimension = cut_dimension(module, style)
        if dimension is not None and (length := module.weight.shape[dimension]) % size:  # type: ignore[index]
            problems.append(f"{name} has {length} {_side(module, dimension)}")
    if problems:
        raise ContextError(
            f"tp_size={size} does not divide these: {'; '.join(problems)}; choose a tp_size that does, or pad them"
        )


def _cut_below(name: str, styles: Mapping[str, Any]) -> bool:
    """Return whether a direct part of the module *name* is cut, as the projections of an attention are."""
    return any(styled.rpartition(".")[0] == name for styled in styles)


def _side(module: nn.Module, dimension: int) -> str:
    if isinstance(module, nn.Linear):
        return "output features" if dimension == 0 else "input features"
    return "embeddings" if dimension == 0 else "features of an embedding"
