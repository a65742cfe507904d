"""Memory of training a model on each process of a parallel run, from shapes alone: the model may be on ``meta``.

Parameters, gradients and optimizer states are counted tensor by tensor as they are cut; activations follow a formula
for transformers. docs/how-to/choose-parallelism.md says where each comes from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from orc.runtime.core.parsing import nearest
from orc.runtime.core.topology import DIMENSIONS
from orc.runtime.memory.sizes import class_names, dtype_byte_size

OPTIMIZERS = ("adamw", "adam8bit", "adafactor", "sgd", "momentum")
_BLOCK = 256  # values of an 8-bit state that share a scale
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True)
class Training:
    """Way of training: what decides about memory beside the model and its layout.

    Attributes:
        sizes: processes along each dimension; those that are not named have one.
        dtype: of parameters, gradients and optimizer states.
        mixed_precision: ``no``, ``bf16`` or ``fp16``; activations then have 16 bits.
        optimizer: one of `OPTIMIZERS`.
        batch: rows that one process gets; 0 where activations are not asked for.
        sequence: tokens of a row.
        microbatches: parts that a pipeline cuts the batch into; by default as many as there are stages.
        checkpointing: activations of a layer are computed again in backward.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    mixed_precision: str = "no"
    optimizer: str = "adamw"
    batch: int = 0
    sequence: int = 0
    microbatches: int | None = None
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if unknown := [name for name in self.sizes if name not in DIMENSIONS]:
            near = nearest(unknown[0], DIMENSIONS)
            raise ValueError(f"there is no dimension {unknown[0]!r}{near}: there are {', '.join(DIMENSIONS)}")
        if bad := [name for name, size in self.sizes.items() if size < 1]:
            raise ValueError(f"{bad[0]}={self.sizes[bad[0]]}: a dimension has at least one process")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        if self.size("cp") > 1 and self.size("sp") > 1:
            raise ValueError("cp and sp are two ways to cut the sequence; choose one")

    def size(self, dim: str) -> int:
        """Processes along *dim*."""
        return self.sizes.get(dim, 1)

    @property
    def processes(self) -> int:
        """All of them."""
        return math.prod(self.sizes.values())

    @property
    def shards(self) -> int:
        """Processes over which FSDP cuts each parameter: those of ``dp_shard``, and of ``cp`` or ``sp`` with them."""
        return self.size("dp_shard") * self.size("cp") * self.size("sp") if self.size("dp_shard") > 1 else 1


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one process in bytes; ``activations`` is `None` where it cannot be known."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int | None

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + (self.activations or 0)


@dataclass(frozen=True)
class ParallelEstimate:
    """Estimate for a parallel run: the memory of a process of each stage, and what the figures leave out."""

    stages: list[ProcessMemory]
    notes: list[str]

    @property
    def largest(self) -> ProcessMemory:
        """That of the stage that needs the most."""
        return max(self.stages, key=lambda one: one.total)


def estimate_parallel_memory(model: nn.Module, training: Training) -> ParallelEstimate:
    """Estimate the memory that each process needs to train *model*.

    Raises:
        ValueError: the model cannot be laid out so.
    """
    notes: list[str] = []
    if training.size("pp") > 1 and any(training.size(name) > 1 for name in ("tp", "cp", "sp")):
        notes.append("pp with tp, cp or sp: Accelerator trains so with Megatron-LM alone")
    plan = _plan(model, training, notes)
    stages = _stages(model, training.size("pp"))
    width = dtype_byte_size(training.dtype)
    unit = _gathered(model)
    found = []
    for number, names in enumerate(stages):
        cut = {name: _part(name, parameter, training, plan) for name, parameter in names.items()}
        held = sum(math.prod(shape) for shape in cut.values())
        trained = [shape for name, shape in cut.items() if names[name].requires_grad]
        gradients = sum(math.prod(shape) for shape in trained) * width
        if training.shards > 1:  # parameters of a unit whole, and their gradients until they are reduced
            whole = sum(parameter.numel() for parameter in names.values())
            half = width if training.mixed_precision == "no" else 2
            gathered = 2 * half * (whole if training.size("pp") > 1 else min(unit, whole)) / training.size("tp")
        else:
            # DDP keeps a second copy of the gradients, from which it sends.
            gathered = gradients if training.size("dp_replicate") > 1 else 0
        found.append(
            ProcessMemory(
                int(held * width),
                int(gradients),
                int(sum(_states(shape, training.optimizer, width) for shape in trained)),
                int(gathered),
                _activations(model, training, number, notes),
            )
        )
    return ParallelEstimate(found, list(dict.fromkeys(notes)))


# ---- where parameters lie


def _stages(model: nn.Module, count: int) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each stage by name; one that several stages use is in each of them."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if count == 1:
        return [_distinct(named)]
    from orc.runtime.parallel.stages import automatic_map

    owners = automatic_map(model, count, None)
    stages: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    reached = 0
    for name, parameter in named.items():  # in the order of the modules, which is taken for that of their calls
        owner = next((key for key in owners if name == key or name.startswith(f"{key}.")), None)
        reached = max(reached, 0 if owner is None else owners[owner])
        stages[reached][name] = parameter
    if not all(stages):
        raise ValueError(f"pp={count}: the model has fewer parts than stages")
    return [_distinct(stage) for stage in stages]


def _distinct(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    first = {id(parameter): name for name, parameter in reversed(list(named.items()))}
    return {name: parameter for name, parameter in named.items() if first[id(parameter)] == name}


def _plan(model: nn.Module, training: Training, notes: list[str]) -> dict[str, str]:
    """Return how tensor parallelism cuts modules, by patterns of their names; empty where nothing is cut."""
    if training.size("tp") == 1:
        return {}
    plan = {str(name): str(style) for name, style in (getattr(model, "tp_plan", None) or {}).items()}
    if not plan:
        plan = {name: "colwise" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        notes.append("the model has no tp_plan: tp is counted as if it cut every linear layer")
    return plan


def _part(name: str, parameter: Tensor, training: Training, plan: Mapping[str, str]) -> tuple[int, ...]:
    """Return the shape of what the first process of each group has of *parameter*."""
    shape = list(parameter.shape)
    module, _, leaf = name.rpartition(".")
    style = next((how for pattern, how in plan.items() if _matches(pattern, module)), "")
    dim = {"colwise": 0, "rowwise": -1}.get(style.removesuffix("_rep").removesuffix("_gather_output"))
    if dim is not None and shape and not (dim == -1 and leaf == "bias"):
        shape[dim] = -(-shape[dim] // training.size("tp"))
    if shape and training.shards > 1:
        shape[0] = -(-shape[0] // training.shards)
    return tuple(shape)


def _matches(pattern: str, name: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", r"[^.]+")
    return re.search(rf"(?:^|\.){expression}$", name) is not None


def _gathered(model: nn.Module) -> int:
    """Return the elements that FSDP has whole at a time: the largest block, and what is in no block."""
    whole = class_names(getattr(model, "_no_split_modules", None))
    blocks = [module for module in model.modules() if type(module).__name__ in whole]
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    every = sum(parameter.numel() for parameter in model.parameters())
    return every - sum(sizes) + max(sizes, default=0)


def _states(shape: Sequence[int], optimizer: str, width: float) -> float:
    count = math.prod(shape)
    if optimizer == "adamw":
        return 2 * count * width + 4  # two moments, and the number of steps
    if optimizer == "adam8bit":
        return 2 * (count + 4 * -(-count // _BLOCK))
    if optimizer == "adafactor":  # sums of rows and columns of matrices
        return 4 * (sum(shape) if len(shape) == 2 else count)
    return count * width if optimizer == "momentum" else 0


# ---- activations


def _activations(model: nn.Module, training: Training, stage: int, notes: list[str]) -> int | None:
    """Return the bytes that forward keeps for backward in *stage*, by the formula for transformers."""
    if not training.batch:
        notes.append("activations are not counted: give the rows of a process and the tokens of a row")
        return None
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    facts = {key: next((v for n in names if (v := getattr(text, n, None))), None) for key, names in _NAMES.items()}
    if not facts["hidden"] or not facts["layers"] or not training.sequence:
        notes.append("activations are not known: the formula needs a transformer's hidden size and layers, and tokens")
        return None
    notes.append(
        "activations: transformer layers without a kept attention matrix (SDPA, flash attention); see the guide"
    )
    stages, tp = training.size("pp"), training.size("tp")
    parts = training.microbatches or stages
    rows = -(-training.batch // parts) if stages > 1 else training.batch
    flying = min(stages - stage, parts) if stages > 1 else 1  # micro-batches that wait for their backward with 1F1B
    tokens = rows * -(-training.sequence // (training.size("cp") * training.size("sp")))
    wide = 2 if training.mixed_precision == "no" and training.dtype == "float32" else 1  # the formula is for 16 bits
    layers = -(-int(facts["layers"]) // stages)
    per_layer = tokens * int(facts["hidden"]) * (2 if training.checkpointing else 10 + 24 / tp) * wide
    kept = layers * per_layer * flying
    if training.checkpointing:  # one layer at a time is computed again
        kept += tokens * int(facts["hidden"]) * (10 + 24 / tp) * wide
    if stage == stages - 1 and facts["vocabulary"]:
        kept += 4 * tokens * int(facts["vocabulary"]) / tp  # logits in float32, for the loss
    return int(kept)


def parse_parallelism(text: str) -> dict[str, int]:
    """Return the sizes in *text*: ``dp_shard=4,tp=2``.

    Raises:
        ValueError: it cannot be read, or names a dimension twice, or one that there is not.
    """
    sizes: dict[str, int] = {}
    for item in filter(None, (one.strip() for one in text.split(","))):
        name, sign, value = item.partition("=")
        name = name.strip().removesuffix("_size")
        if not sign or not value.strip().isdecimal() or name in sizes:
            raise ValueError(f"--parallelism {text!r}: {item!r} is no DIMENSION=PROCESSES, each once: dp_shard=4,tp=2")
        sizes[name] = int(value)
    Training(sizes)  # checks the names
    return sizes
