"""Conversion of a configuration file of Accelerate to ``job.yaml`` and an entry of ``clusters.yaml``.

Every value of the file either becomes a key there or a note that says why it does not, or what else to write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orc.launchers.accelerate.config_file import AccelerateConfig
from orc.launchers.accelerate.draft import Draft, Note, Notes, on_machines, on_sagemaker, on_tpu
from orc.launchers.accelerate.keys import of_group
from orc.launchers.errors import SpecError
from orc.launchers.spec.load import validate
from orc.launchers.spec.source import Document
from orc.runtime.core import fp8_settings
from orc.runtime.core.config import ConfigError, check

_SHARDED = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
_ON_GPUS = ("MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
_NO_DEVICE = "orc.runtime trains on CUDA, MPS, XLA devices and CPUs: not on this kind of device"
_UNKNOWN = {
    "MODEL_PARALLEL": "SageMaker's model parallelism is not supported; shard the model with runtime.fsdp",
    "MULTI_NPU": _NO_DEVICE,
    "MULTI_XPU": _NO_DEVICE,
}


@dataclass(frozen=True)
class Conversion:
    """Job and clusters that a configuration became, as data, and the notes about what has no equivalent."""

    config: AccelerateConfig
    job: Mapping[str, Any]
    clusters: Mapping[str, Mapping[str, Any]]
    notes: tuple[Note, ...]

    def job_text(self) -> str:
        """Return the text of ``job.yaml``, its notes at the top."""
        return _header(f"Converted from {self.config.path.name}", self.notes) + _yaml(self.job)

    def clusters_text(self) -> str:
        """Return the text of ``clusters.yaml``; empty where the cluster ``local`` does."""
        if not self.clusters:
            return ""
        return _header(f"Converted from {self.config.path.name}; add it to your clusters.yaml", ()) + _yaml(
            self.clusters
        )


def convert(config: AccelerateConfig, *, script: str = "train.py", name: str | None = None) -> Conversion:
    """Return the job of *config* that runs *script*, called *name* (the name of the file unless given).

    Raises:
        SpecError: values that exclude each other, with the place; a *script* or *name* that a job cannot have.
    """
    title = name or job_name(config.path.stem)
    draft = Draft(config, Notes(config), {"name": title, "script": script})
    draft.take("compute_environment")
    kind = draft.take("distributed_type", "NO")
    if kind in _UNKNOWN:
        draft.notes.add("distributed_type", _UNKNOWN[kind])
    _runtime(draft)
    _sharding(draft, kind)
    _parallelism(draft)
    if config.sagemaker:
        on_sagemaker(draft, title)
    elif config.tpu:
        on_tpu(draft, title)
    else:
        _processes(draft, kind)
        _launcher(draft)
        on_machines(draft, title)
    draft.notes.settle_rest()
    if draft.launcher:
        draft.job["launcher"] = _short(draft.launcher)
    sections = {"resources": draft.resources, "env": draft.env, "setup": draft.setup, "runtime": draft.runtime}
    draft.job |= {key: part for key, part in sections.items() if part}
    validate(Document(_plain(draft.job), f"the job of {config.path}", {}, {}))  # a name or script that cannot be
    return Conversion(config, draft.job, draft.clusters, draft.notes.all())


def job_name(text: str) -> str:
    """Return *text* as the name of a job or cluster: letters, digits, dots, dashes, underscores."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._")[:60]
    return name or "job"


def _short(launcher: Mapping[str, Any]) -> Any:
    kind = launcher.get("kind", "torchrun")
    return {"kind": kind, "options": launcher["options"]} if launcher.get("options") else kind


def _runtime(draft: Draft) -> None:
    """Settings of the runtime that a file has outside its sections."""
    precision = draft.take("mixed_precision", "no")
    if precision != "no":
        draft.runtime["mixed_precision"] = precision
    _fp8(draft, precision)
    for name in ("cpu", "debug", "downcast_bf16"):
        if draft.take(name):
            draft.runtime[str(draft.config.given[name].option.setting)] = True
    for option in of_group("dynamo"):
        if option.setting and not option.says_nothing(value := draft.take(option.name)):
            draft.runtime[option.setting] = value.lower() if isinstance(value, str) else value
    backend = draft.runtime.get("dynamo_backend")
    if not backend:
        for key in [key for key in draft.runtime if key.startswith("dynamo_")]:
            del draft.runtime[key]  # of a compilation that is off
    if draft.take("enable_cpu_affinity"):
        draft.env["ACCELERATE_CPU_AFFINITY"] = "1"


def _fp8(draft: Draft, precision: str) -> None:
    """``fp8_config``, without what the chosen back end does not have."""
    given = {option.name: draft.take(option.name) for option in of_group("fp8") if option.name in draft.config.given}
    chosen = given.get("fp8_backend")
    settings: dict[str, Any] = {}
    for name, value in given.items():
        setting = fp8_settings.SPELLINGS[name]
        if precision != "fp8":
            draft.notes.add(name, f"has no effect: mixed_precision is {precision}, not fp8")
        elif setting.backend not in (None, chosen) and chosen is not None:
            draft.notes.add(name, f"has no effect: it belongs to the back end {setting.backend}, not to {chosen}")
        elif value is not None:
            value = value[0] if isinstance(value, list) and len(set(value)) == 1 else value
            settings[setting.key] = value.lower() if setting.key == "backend" else value
    if precision == "fp8" and settings:
        draft.runtime["fp8"] = settings


def _sharding(draft: Draft, kind: str) -> None:
    """``fsdp_config``, ``deepspeed_config`` and ``megatron_lm_config``, each where the kind of the run is its own."""
    for of, section in _SHARDED.items():
        given = {
            option.name: draft.config.get(option.name)
            for option in of_group(section)
            if option.job and option.job.startswith(f"runtime.{section}.") and option.name in draft.config.given
        }
        for name in given:
            draft.notes.settle(name)
            if kind != of:
                draft.notes.add(name, f"has no effect: distributed_type is {kind}, not {of}")
        if kind == of:
            values = {
                name.removeprefix("fsdp_").removeprefix("megatron_lm_"): ",".join(value)
                if isinstance(value, list)
                else value
                for name, value in given.items()
            }
            if section == "deepspeed" and "gradient_accumulation_steps" in draft.config.given:
                values["gradient_accumulation_steps"] = draft.take("gradient_accumulation_steps")
            try:
                check(section, values)
            except ConfigError as error:
                raise SpecError(str(error), where=draft.config.where("distributed_type")) from None
            draft.runtime[section] = values
    if (steps := draft.take("gradient_accumulation_steps")) and kind != "DEEPSPEED" and steps != 1:
        draft.runtime["gradient_accumulation_steps"] = steps
    file = draft.config.get("deepspeed_config_file")
    if kind == "DEEPSPEED" and file and set(draft.runtime["deepspeed"]) - {"deepspeed_config_file", "zero3_init_flag"}:
        what = "other values of the section fill what is `auto` in it; ranks refuse one that is set in both"
        draft.notes.add("deepspeed_config_file", what)
    if kind == "DEEPSPEED" and file and file.startswith(("/", "~")):
        draft.notes.add(
            "deepspeed_config_file",
            "only the workdir travels to the nodes: copy the file beside the script and give its relative path",
        )


def _parallelism(draft: Draft) -> None:
    settings = {
        option.name.removeprefix("parallelism_config_"): value
        for option in of_group("parallelism")
        if not option.says_nothing(value := draft.take(option.name, option.default))
    }
    if settings:
        try:
            draft.runtime["parallelism"] = check("parallelism", settings)
        except ConfigError as error:
            raise SpecError(str(error), where=draft.config.where("distributed_type")) from None


def _processes(draft: Draft, kind: str) -> None:
    """Machines and processes as nodes and processes per node."""
    nodes, total = draft.take("num_machines", 1), draft.take("num_processes", None)
    per_node = max((total or nodes) // nodes, 1)
    draft.resources |= {"nodes": nodes, "procs_per_node": per_node}
    if kind in _ON_GPUS and not draft.config.get("cpu"):
        draft.resources["gpus_per_node"] = per_node
    if threads := draft.take("num_cpu_threads_per_process"):
        draft.resources["cpus_per_proc"] = threads
    ids = draft.take("gpu_ids", [])
    if ids and ids != ["all"]:
        draft.notes.add(
            "gpu_ids", "a job says how many GPUs it needs (resources.gpus_per_node) and gets some that are free"
        )


def _launcher(draft: Draft) -> None:
    """The launcher of the ranks and its options."""
    options: dict[str, Any] = {}
    if draft.config.get("mpirun_hostfile") or draft.config.get("mpirun_ccl"):
        # Intel's MPI is what the documentation has with oneCCL; `auto` finds out which one is there.
        if threads := draft.take("mpirun_ccl"):
            options["ccl_worker_count"] = threads
        draft.launcher |= {"kind": "mpirun", "options": options}
        draft.notes.settle("rdzv_backend")
        return
    runner = draft.take("deepspeed_multinode_launcher", "standard")
    filters = {
        key: value
        for key, name in (("include", "deepspeed_inclusion_filter"), ("exclude", "deepspeed_exclusion_filter"))
        if (value := draft.take(name))
    }
    if filters or runner not in ("standard", "nossh", "pdsh"):
        chosen = runner if runner in ("pdsh", "openmpi", "mpich", "impi", "slurm") else "pdsh"
        draft.launcher |= {"kind": "deepspeed", "options": {"launcher": chosen, **filters}}
        draft.notes.settle("rdzv_backend")
        return
    restarts = draft.take("max_restarts", 0)
    meeting = draft.take("rdzv_backend", "static")
    if meeting.startswith("etcd"):
        draft.notes.add("rdzv_backend", "nodes of a job meet at node 0, by c10d; no etcd is needed")
    if meeting != "static" or restarts:
        options["rdzv_backend"] = "c10d"
    if restarts:
        options["max_restarts"] = restarts
    for name in ("rdzv_conf", "monitor_interval"):
        if (value := draft.take(name)) is not None:
            options[name] = value
    if options:
        draft.launcher |= {"kind": "torchrun", "options": options}


def _header(title: str, notes: tuple[Note, ...]) -> str:
    import textwrap

    lines = [f"# {title}."]
    keys: dict[str, list[str]] = {}
    for note in notes:
        keys.setdefault(note.text, []).append(note.key)
    for text, those in keys.items():
        wrapped = textwrap.wrap(f"{', '.join(those)}: {text}", 110, break_on_hyphens=False, break_long_words=False)
        lines += [f"{'#  ' if number else '# -'} {line}" for number, line in enumerate(wrapped)]
    return "\n".join(lines) + "\n"


def _yaml(data: Any) -> str:
    import yaml

    return yaml.safe_dump(_plain(data), sort_keys=False, allow_unicode=True, width=110)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
