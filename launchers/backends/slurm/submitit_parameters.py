"""Parameters of submitit's `AutoExecutor` and `SlurmExecutor`, read as what a job of orc requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orc.launchers.backends.slurm.options import SlurmOptions
from orc.launchers.errors import SpecError

_RESOURCES = {
    "nodes": "nodes",
    "tasks_per_node": "procs_per_node",
    "ntasks_per_node": "procs_per_node",
    "gpus_per_node": "gpus_per_node",
    "num_gpus": "gpus_per_node",
    "cpus_per_task": "cpus_per_proc",
    "mem": "memory",
}
_RENAMED = {"signal_delay_s": "signal_lead"}
_MEANINGLESS = frozenset(("stderr_to_stdout", "use_srun"))  # a rank has one log; srun starts the agents, which start it


@dataclass(frozen=True)
class FunctionParameters:
    """Function job that parameters of submitit describe."""

    name: str | None
    resources: Mapping[str, Any]  # the section of a job file
    setup: tuple[str, ...]
    at_once: int | None


def read_parameters(parameters: Mapping[str, Any]) -> FunctionParameters:
    """Return what *parameters* of ``update_parameters`` request.

    Args:
        parameters: Those of all executors (``timeout_min``, ``mem_gb``, ``gpus_per_node``, ...), and those of Slurm
            with or without their prefix (``slurm_partition`` or ``partition``).

    Raises:
        SpecError: A parameter is unknown, or cannot be carried.
    """
    resources: dict[str, Any] = {}
    options: dict[str, Any] = {}
    given = {key.removeprefix("slurm_"): value for key, value in parameters.items() if value is not None}
    name = given.pop("job_name", None) or given.pop("name", None)
    setup = tuple(given.pop("setup", ()))
    at_once = given.pop("array_parallelism", None)
    if (minutes := given.pop("timeout_min", given.pop("time", None))) is not None:
        resources["time"] = round(minutes * 60)
    if (gigabytes := given.pop("mem_gb", None)) is not None:
        resources["memory"] = f"{round(gigabytes * 1024)}M"
    extra = dict(given.pop("additional_parameters", {}))
    known = set(SlurmOptions.model_fields)
    for key, value in {**given, **{name.replace("-", "_"): value for name, value in extra.items()}}.items():
        if key in _RESOURCES:
            resources[_RESOURCES[key]] = value
        elif (option := _RENAMED.get(key, key)) in known:
            options[option] = value
        elif key in given and key not in _MEANINGLESS:
            raise SpecError(
                f"submitit's parameter {key!r} cannot be carried by a job", hint="Use resources.options.slurm."
            )
        elif key not in given:
            options.setdefault("extra", {})[key.replace("_", "-")] = value
    return FunctionParameters(
        name, {**resources, **({"options": {"slurm": options}} if options else {})}, setup, at_once
    )
