"""Megatron-LM settings that a launcher hands to the ranks: names, variables and how their values read. Torch-free.

`orc launch`, a job's ``runtime.megatron`` and the plug-in of the training processes share this one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orc.runtime.core.parsing import number, read_mapping, read_variables, truth, variable_text, whole

USE = "ACCELERATE_USE_MEGATRON_LM"
PREFIX = "MEGATRON_LM_"


@dataclass(frozen=True, repr=False, eq=False)
class MegatronKey:
    """Megatron-LM setting: its documented name, the parser of its values, its default and its description."""

    name: str
    parse: Callable[[Any], Any]
    default: Any
    doc: str

    @property
    def variable(self) -> str:
        """Variable that carries it to the ranks."""
        return PREFIX + self.name.upper()


KEYS = {
    key.name: key
    for key in (
        MegatronKey("tp_degree", whole(1), 1, "Processes that share the matrices of each layer."),
        MegatronKey("pp_degree", whole(1), 1, "Stages of consecutive layers, each on processes of its own."),
        MegatronKey("num_micro_batches", whole(1), 1, "Parts in which a batch goes through the stages."),
        MegatronKey("sequence_parallelism", truth, False, "Share the sequence between the layers, with tp_degree > 1."),
        MegatronKey("recompute_activations", truth, False, "Recompute the attention in backward, to save memory."),
        MegatronKey(
            "use_distributed_optimizer", truth, False, "Shard the optimizer's state over the data parallel processes."
        ),
        MegatronKey("gradient_clipping", number(0), 1.0, "Largest L2 norm of all gradients; 0 means no limit."),
    )
}


def check_value(name: str, value: Any) -> Any:
    """Return the parsed *value* of the setting *name*. Raises `ValueError`, which names it."""
    try:
        return KEYS[name].parse(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}={value!r} of Megatron-LM: {error}") from None


def from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that variables of *env* give. Raises `ValueError`, which names the variable."""
    return read_variables(env, ((key.name, key.variable, key.parse) for key in KEYS.values()))


def normalise(values: Any) -> dict[str, Any]:
    """Return *values*, a mapping with the documented keys with or without ``megatron_lm_``, each in its key's type.

    Raises:
        ValueError: an unknown key, a value it cannot have, or one without its partner.
    """
    parsers = {name: (name, key.parse) for name, key in KEYS.items()}
    normal = read_mapping(values, parsers, "{tp_degree: 2, pp_degree: 2}", "megatron_lm_")
    if (problem := conflict(normal)) is not None:
        raise ValueError(problem)
    return normal


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that bring *values* (see `normalise`) to the ranks, and switch Megatron-LM on.

    Raises:
        ValueError: as `normalise`.
    """
    return {USE: "true"} | {KEYS[name].variable: variable_text(value) for name, value in normalise(values).items()}


def check_with(
    values: Mapping[str, Any],
    *,
    precision: str = "no",
    accumulation: int = 1,
    others: Sequence[str] = (),
    processes: int | None = None,
) -> None:
    """Check settings (see `normalise`) against the rest of a run, as far as it is known before ranks start.

    Args:
        values: of Megatron-LM.
        precision: ``mixed_precision``.
        accumulation: batches per optimizer step.
        others: other ways to train that are asked for too, by name.
        processes: ranks of the run; `None` where nobody knows yet.

    Raises:
        ValueError: it would be refused by every rank.
    """
    complete = {name: key.default for name, key in KEYS.items()} | normalise(values)
    if others:
        raise ValueError(f"Megatron-LM and {others[0]} are two ways to train one model; choose one")
    if accumulation != 1:
        raise ValueError(
            f"gradient_accumulation_steps is {accumulation}, and must be 1 with Megatron-LM: set num_micro_batches"
        )
    if precision == "fp8":
        raise ValueError("mixed_precision fp8 is not possible with Megatron-LM")
    if processes is None:
        return
    ranks = complete["tp_degree"] * complete["pp_degree"]
    if processes % ranks:
        raise ValueError(
            f"tp_degree {complete['tp_degree']} x pp_degree {complete['pp_degree']} needs a multiple of {ranks} "
            f"processes, and there are {processes}"
        )


def conflict(settings: Mapping[str, Any]) -> str | None:
    """Return which of *settings* lacks its partner, as far as that shows without a model; `None` if none does."""
    values = {name: settings.get(name, key.default) for name, key in KEYS.items()}
    if values["sequence_parallelism"] and values["tp_degree"] == 1:
        return "sequence_parallelism shares sequences among the tensor parallel processes: set tp_degree above 1"
    return None
