"""Agreement of all ranks, before anything is prepared, on how they train and on what they prepare.

Ranks that differ would wait for each other for ever, or train models that are not one. Here every rank says what it was
told and what it has, in one small collective, and all of them raise the same error where two differ.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from orc.runtime.collectives.objects import all_gather_pickled, broadcast_object_list
from orc.runtime.core.errors import ContextError
from orc.runtime.parallel import is_sharded
from orc.runtime.parallel.replacements import named_parameters

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.options import Options
    from orc.runtime.train.engine import Engine

_PLACES = ("path", "dir")  # in names of settings: where a machine keeps its files is its own affair


class _Record(NamedTuple):
    """Record of one rank: its settings in words, the kinds of its objects, and a digest of each of its models."""

    settings: Sequence[tuple[str, str]]
    objects: Sequence[str]
    stage: int  # models are compared among the ranks of one stage of a pipeline
    models: Sequence[bytes]


def check_agreement(objects: Sequence[Any], engine: Engine, options: Options) -> None:
    """Compare on all ranks how they train, and the *objects* of one `prepare`.

    A collective where something is trained. A loader or a model for evaluation is prepared without the others: by one
    rank alone, or while they wait in `main_process_first`.

    Raises:
        ContextError: two ranks differ; the same on every rank, with the first difference.
    """
    ctx = engine.ctx
    if ctx.mirrored or ctx.group is None:
        return
    models = [_tensors(item, engine) for item in objects if isinstance(item, nn.Module)]
    if not any(models) and not any(isinstance(item, Optimizer) for item in objects):
        return
    digests = [hashlib.blake2b(repr(model).encode(), digest_size=16).digest() for model in models]
    mine = _Record(_settings(engine, options), _kinds(objects), ctx.topology.place("pp"), digests)
    told: list[_Record] = all_gather_pickled(mine, ctx, "prepare")
    _compare_settings(told)
    calls = [f"prepare({', '.join(record.objects)})" for record in told]
    _compare(
        calls, "the ranks prepare different objects: {}", "Call it on all of them with the same, in the same order"
    )
    for rank, theirs in enumerate(told):
        first = next(other for other, record in enumerate(told) if record.stage == theirs.stage)
        index = next((at for at, digest in enumerate(theirs.models) if digest != told[first].models[at]), None)
        if index is not None:
            wanted, other = (_tensors_of(source, models[index], ctx) for source in (first, rank))
            raise ContextError(
                f"the model of rank {rank} is not that of rank {first}: {_difference(wanted, other)}. Make the same "
                "model on all ranks"
            )


def _compare_settings(told: Sequence[_Record]) -> None:
    names = dict.fromkeys(name for record in told for name, _ in record.settings)
    values = [dict(record.settings) for record in told]
    for name in names:
        _compare(
            [value.get(name, "not there") for value in values],
            f"the ranks were told to train in different ways: {name} is {{}}",
            "Give all of them the same arguments of Accelerator(...) and the same environment",
        )


def _compare(said: Sequence[str], what: str, remedy: str) -> None:
    """Raise `ContextError` unless *said* is the same on all ranks: *what* differs, on which ranks, and the *remedy*."""
    if len(set(said)) == 1:
        return
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(said):
        ranks.setdefault(text, []).append(rank)
    shown = " and ".join(f"{text} on {_ranks(those)}" for text, those in ranks.items())
    raise ContextError(f"{what.format(shown)}. {remedy}")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# ---- how they train


def _settings(engine: Engine, options: Options) -> list[tuple[str, str]]:
    ctx = engine.ctx
    config, plugin, library = ctx.config, ctx.fsdp_plugin, ctx.library
    said = [("the engine", engine.name), ("fsdp_plugin", "given" if plugin is not None else "not given")]
    said.append(("the layout of the ranks", str(ctx.topology)))
    found: dict[str, Any] = {
        "mixed_precision": config.mixed_precision,
        "strategy": config.strategy,
        "gradient_accumulation_steps": ctx.gradient.num_steps,
    }
    for title, values in (
        ("DataLoaderConfiguration", vars(options.dataloader)),
        ("DistributedDataParallelKwargs", vars(options.ddp)),
        ("fsdp_plugin", {} if plugin is None else vars(plugin)),
        ("" if library is None else library.title, {} if library is None else library.agreed()),
    ):
        found |= {f"{title}: {name}": value for name, value in _flat(values)}
    return said + [(name, _shown(value)) for name, value in found.items()]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The settings in *values* and in mappings inside, with their whole names; without places of files."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not any(place in str(name).lower() for place in _PLACES):
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    """*value* in words that are the same in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, str | int | float | torch.dtype):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        shown = [_shown(item) for item in value]
        return f"[{', '.join(shown if isinstance(value, list | tuple) else sorted(shown))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ", ".join(f"{field.name}={_shown(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({fields})"
    if isinstance(value, type | types.FunctionType):
        return value.__qualname__
    return f"a {type(value).__name__}"


# ---- what they prepare

_KINDS = ((nn.Module, "model"), (DataLoader, "loader"), (LRScheduler, "scheduler"))


def _kinds(objects: Sequence[Any]) -> list[str]:
    """Return the kind of each of *objects* that is prepared; the others come back as they are, and may differ."""
    kinds = []
    for item in objects:
        if isinstance(item, Optimizer):
            kinds.append(type(getattr(item, "optimizer", item)).__name__)
        elif known := [kind for base, kind in _KINDS if isinstance(item, base)]:
            kinds.append(known[0])
        elif type(item).__module__.startswith("orc.runtime."):  # placeholders of what a library makes
            kinds.append(type(item).__name__)
    return kinds


def _tensors(model: nn.Module, engine: Engine) -> dict[str, str]:
    """Return type, shape and trainability of the tensors that all ranks must have alike, by name.

    None of a model that nobody spreads: one that is not trained, that is cut already, or that each rank trains by
    itself.
    """
    ctx = engine.ctx
    own = named_parameters(model)
    if (
        ctx.config.strategy == "none"
        or is_sharded(model)
        or any(model is known for known in engine.prepared.models)
        or not any(tensor.requires_grad for tensor in own.values())
    ):
        return {}
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    described = {name: _facts(tensor) + ("" if tensor.requires_grad else ", frozen") for name, tensor in own.items()}
    if ctx.library is None:  # replicas have the buffers of one rank
        described |= {name: _facts(tensor) for name, tensor in model.named_buffers(remove_duplicate=False)}
    return {name: facts for name, facts in described.items() if name not in ignored}


def _facts(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "not initialized"
    return f"{tensor.dtype} {list(getattr(tensor, 'ds_shape', tensor.shape))}"  # DeepSpeed keeps the shape of shards


def _tensors_of(rank: int, mine: dict[str, str], ctx: RunContext) -> dict[str, str]:
    """Return what *rank* has where this one has *mine*; a collective."""
    tensors: dict[str, str] = broadcast_object_list([mine], rank, ctx=ctx)[0]
    return tensors


def _difference(wanted: Mapping[str, str], other: Mapping[str, str]) -> str:
    for name in [*wanted, *other]:
        if wanted.get(name) != other.get(name):
            return f"{name} is {other.get(name, 'missing')} instead of {wanted.get(name, 'missing')}"
    return f"its parameters come in another order: {_orders(wanted, other)}"


def _orders(wanted: Iterable[str], other: Iterable[str]) -> str:
    ours, theirs = next(pair for pair in zip(wanted, other, strict=True) if pair[0] != pair[1])
    return f"{theirs} where {ours} is"
