"""Options of Slurm: ``options:`` of a cluster and ``resources.options.slurm`` of a job. Pure.

Every key is checked here, once: a value that would add a line to the batch script, or that contradicts what orc itself
relies on (job name, output, number of tasks), never reaches ``sbatch``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, model_validator

from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.options import Machine, SshOptions
from orc.launchers.spec.options import (
    Flag,
    FrozenModel,
    Memory,
    Number,
    Reader,
    Whole,
    Word,
    matching,
    seconds,
    several,
    text,
    validate_options,
    word,
)
from orc.launchers.spec.problems import nearest
from orc.launchers.spec.source import Document, KeyPath, Origin, Placed, document_of

_SUBMITS = "with it nothing is submitted"

RESERVED = {
    "array": "submit one job per array element",
    "chdir": "ranks run in the job's working copy of `workdir`",
    "clusters": "describe each Slurm cluster by itself, with its own `conf`",
    "cpus-per-gpu": "use `resources.cpus_per_proc`",
    "cpus-per-task": "use `resources.cpus_per_proc`",
    "error": "every rank has a log of its own: `orc logs`",
    "export": "use the key `export`",
    "export-file": "use `env:` of the job or of the cluster",
    "gpus": "use `resources.gpus_per_node`; Slurm may give one node more of a total than another",
    "gpus-per-node": "use `resources.gpus_per_node`",
    "gpus-per-socket": "use `resources.gpus_per_node`",
    "gpus-per-task": "use `resources.gpus_per_node`, and `gpus_as` for how they are asked for",
    "help": _SUBMITS,
    "input": "ranks have no standard input",
    "job-name": "the job name is how orc finds the job again",
    "no-requeue": "use `requeue: false`",
    "nodes": "use `resources.nodes`",
    "ntasks": "use `resources.procs_per_node`",
    "ntasks-per-core": "use `resources.procs_per_node`",
    "ntasks-per-gpu": "use `resources.procs_per_node`",
    "ntasks-per-node": "use `resources.procs_per_node`",
    "ntasks-per-socket": "use `resources.procs_per_node`",
    "open-mode": "orc always appends, so that a requeued job keeps its output",
    "output": "every rank has a log of its own: `orc logs`",
    "parsable": "orc reads the job id",
    "signal": "use `signal_lead`",
    "test-only": "use `orc render`",
    "time-min": "orc must know when the time is up; use `resources.time`",
    "time": "use `resources.time`",
    "usage": _SUBMITS,
    "version": _SUBMITS,
    "wait": "use `orc wait`",
    "wrap": "use `command:` of the job",
}

# Options of sbatch that are not what they begin like: a key of ours (an OCI bundle, a free text of the job).
NOT_RESERVED = frozenset({"container", "extra"})

_STARTS = "with it nothing is started"
# The same for the srun that starts the agents.
RESERVED_IN_SRUN = {
    "cpus-per-task": RESERVED["cpus-per-task"],
    "error": RESERVED["error"],
    "export": "use `env:` of the job or of the cluster, or the key `export`",
    "help": _STARTS,
    "het-group": "use `heterogeneous`",
    "input": RESERVED["input"],
    "jobid": "the agents run in their own job",
    "kill-on-bad-exit": "orc relies on it",
    "label": RESERVED["output"],
    "multi-prog": "use `command:` of the job",
    "nodes": RESERVED["nodes"],
    "ntasks": RESERVED["ntasks"],
    "ntasks-per-node": RESERVED["ntasks-per-node"],
    "output": RESERVED["output"],
    "pty": "use `orc ssh` to look into a job",
    "test-only": _STARTS,
    "usage": _STARTS,
    "version": _STARTS,
}
SHORT_SRUN_OPTIONS = {
    "c": "cpus-per-task",
    "e": "error",
    "h": "help",
    "i": "input",
    "K": "kill-on-bad-exit",
    "l": "label",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "V": "version",
}


_OPTION = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MEMORY = frozenset({"mem", "mem_per_cpu", "mem_per_gpu"})  # one replaces the others
EXCLUSIVE = ("user", "mcs", "topo")
EARLIEST_S = 65535  # before the time limit, that Slurm can send a signal
_Mount = Annotated[str, matching(r"[^:,]+(?::[^:,]+){0,2}", "a mount", "/data:/data:ro")]
_Model = TypeVar("_Model", bound=FrozenModel)


@Reader
def _path(value: Any) -> str:
    found: str = text(value)
    if not found.startswith("/"):
        raise ValueError(f"{found!r} must be an absolute path on the cluster")
    return found


def _all_memory(value: Any) -> str:
    if value not in (0, "0", "all") or isinstance(value, bool):
        raise ValueError(f"only 0 (all the memory of each node) can be given here, not {value!r}; use resources.memory")
    return "0"


def _exclusive(value: Any) -> bool | str:
    if isinstance(value, bool) or value in EXCLUSIVE:
        return bool(value) if isinstance(value, bool) else str(value)
    raise ValueError(f"expected true, false, {', '.join(EXCLUSIVE[:-1])} or {EXCLUSIVE[-1]}, not {value!r}")


def _words(value: Any) -> tuple[str, ...]:
    return tuple(word(each) for each in _listed(value))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _gres(value: Any) -> tuple[str, ...]:
    """Return generic resources one by one: ``[nvme:1, shard:2]`` or ``nvme:1,shard:2``."""
    found = tuple(entry for each in _words(value) for entry in each.split(","))
    if not all(found):
        raise ValueError(f"{value!r} has an empty entry; write for example nvme:1,shard:2")
    return found


def _comma_list(value: Any) -> str:
    """Return one word for Slurm: ``[node1, node2]`` or ``node[1-2]``."""
    return ",".join(_words(value))


def _export(value: Any) -> str | tuple[str, ...]:
    if value in ("NONE", "ALL"):
        return str(value)
    names = _words(value)
    bad = [name for name in names if not _VARIABLE.fullmatch(name)]
    if bad:
        raise ValueError(f"{bad[0]!r} is not the name of a variable; give NONE, ALL or a list of names")
    return names or "NONE"


def _srun_args(value: Any) -> tuple[str, ...]:
    words = tuple(text(each) for each in _listed(value))
    for given in words:
        if not given.startswith("-"):
            raise ValueError(f"{given!r} is not an option; write every option as one word, like --cpu-bind=none")
        name = given[2:].partition("=")[0] if given.startswith("--") else SHORT_SRUN_OPTIONS.get(given[1:2], "")
        if name and (ours := _meant(name, RESERVED_IN_SRUN)):
            raise ValueError(f"{given} is set by orc: {RESERVED_IN_SRUN[ours]}")
        if name.startswith("container-"):
            raise ValueError(f"{given}: containers have keys of their own, like `container_image`")
    return words


def _meant(option: str, known: Collection[str]) -> str | None:
    """Return the one of *known* that Slurm takes *option* for: its names may be cut short."""
    return option if option in known else next((name for name in known if name.startswith(option)), None)


def _extra(value: Any) -> tuple[tuple[str, str | None], ...]:
    """Return other ``#SBATCH`` options: ``{hint: nomultithread, spread-job: true}`` or ``["--hint=x"]``."""
    pairs: list[tuple[str, str | None]] = []
    if isinstance(value, Mapping):
        for name, given in value.items():
            option = str(name).removeprefix("--").replace("_", "-")
            if given is False or given is None:
                continue
            pairs.append((option, None if given is True else text(given)))
    elif isinstance(value, (list, tuple, str)):
        for item in [value] if isinstance(value, str) else value:
            line = text(item).removeprefix("#SBATCH").strip()
            if not line.startswith("--"):
                raise ValueError(f"{line!r} is not a long option; write for example --hint=nomultithread")
            option, equals, given = line[2:].partition("=")
            pairs.append((option, text(given) if equals else None))
    else:
        raise ValueError("expected a list of --options, or a mapping")
    keys = [name.replace("_", "-") for name in SlurmOptions.model_fields]
    for option, _ in pairs:
        if not _OPTION.fullmatch(option):
            raise ValueError(f"--{option} is not an option; write for example --hint=nomultithread")
        if option in NOT_RESERVED:
            continue
        if option not in keys and (ours := _meant(option, RESERVED)):
            raise ValueError(f"--{option} is set by orc: {RESERVED[ours]}")
        if key := _meant(option, keys):
            raise ValueError(f"--{option} has a key of its own: `{key.replace('-', '_')}`")
    return tuple(pairs)


CommaList = Annotated[str, Reader(_comma_list)]


class NodeOptions(FrozenModel):
    """Options that a job has, and that a component of it may have for itself."""

    partition: CommaList | None = Field(
        None, description="Partition, or several: the first that can start the job is taken."
    )
    account: Word | None = Field(None, description="Account that is charged.")
    qos: Word | None = Field(None, description="Quality of service.")
    reservation: CommaList | None = Field(None, description="Reservation to run in.")
    constraint: Word | None = Field(None, description="Node features, like a100&nvlink.")
    nodelist: CommaList | None = Field(None, description="Nodes that must be part of the job.")
    exclude: CommaList | None = Field(None, description="Nodes that must not.")
    exclusive: Annotated[bool | str, Reader(_exclusive)] = Field(
        False, description="Whole nodes: true, user, mcs or topo."
    )
    gpu_type: Annotated[str, matching(r"[A-Za-z0-9_.-]+", "a GPU type", "a100")] | None = Field(
        None, description="Type of the GPUs that resources.gpus_per_node asks for, like a100."
    )
    gpus_as: Literal["gres", "gpus-per-node", "gpus-per-task"] = Field(
        "gres", description="How GPUs are asked for: gres, gpus-per-node or gpus-per-task."
    )
    gres: Annotated[tuple[str, ...], Reader(_gres)] = Field(
        (), description="Generic resources per node beside the GPUs."
    )
    licenses: CommaList | None = Field(None, description="Licenses.")
    mem_per_cpu: Memory | None = Field(None, description="Memory per CPU core, instead of resources.memory (per node).")
    mem_per_gpu: Memory | None = Field(None, description="Memory per GPU, instead of resources.memory (per node).")
    mem: Annotated[str, Reader(_all_memory)] | None = Field(
        None, description="0: all the memory of each node, instead of resources.memory."
    )


class Component(NodeOptions):
    """Component of a heterogeneous job: its nodes, and the resources and options that it has for itself."""

    nodes: Whole = Field(1, ge=1)
    gpus_per_node: Any = None  # these are checked as resources of the job
    cpus_per_proc: Any = None
    memory: Any = None

    @model_validator(mode="before")
    @classmethod
    def _underscored(cls, data: Any) -> Any:
        found = (
            {str(name).replace("-", "_"): value for name, value in data.items()} if isinstance(data, Mapping) else {}
        )
        if "procs_per_node" in found:
            raise ValueError("procs_per_node is the same on all nodes: set resources.procs_per_node")
        return found or data

    @property
    def resources(self) -> dict[str, Any]:
        """Resources that replace the job's."""
        own = self.model_fields_set - NodeOptions.model_fields.keys()
        return {name: getattr(self, name) for name in {*own, "nodes"}}

    @property
    def options(self) -> dict[str, Any]:
        """Options that replace the job's."""
        return {name: getattr(self, name) for name in self.model_fields_set & NodeOptions.model_fields.keys()}


def _components(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, Mapping) for each in value) or len(value) < 2:
        raise ValueError("expected a list of two components or more, like [{nodes: 1}, {nodes: 2, partition: gpu}]")
    return value


class SlurmOptions(NodeOptions):
    """Options of one job. A job's own value replaces the cluster's."""

    heterogeneous: Annotated[tuple[Component, ...], Reader(_components)] = Field(
        (), description="Several sorts of nodes in one job: a list of components with nodes of their own."
    )
    dependency: Word | None = Field(
        None, description="Like afterok:1234; a dependency that cannot be met ends the job."
    )
    begin: Word | None = Field(None, description="Earliest start, like now+1hour or 2030-01-01T08:00.")
    nice: Annotated[Whole, Field(ge=-2147483645, le=2147483645)] | None = Field(
        None, description="Lower the priority by this much."
    )
    wckey: Word | None = Field(None, description="Workload characterisation key.")
    mail_user: Word | None = Field(None, description="Who gets mail.")
    mail_type: CommaList | None = Field(None, description="When: [BEGIN, END, FAIL, REQUEUE].")
    comment: Annotated[str, text] | None = Field(None, description="Text put behind the marker in the job's comment.")
    requeue: Flag | None = Field(
        None,
        description="Let Slurm run the same job again after preemption or node failure; "
        "follows retry.on when not given.",
    )
    max_requeues: Annotated[Whole, Field(ge=0, le=100_000)] = Field(
        50, description="How often a job may put itself back in the queue after saving."
    )
    signal_lead: Annotated[Number, seconds(0, EARLIEST_S)] | None = Field(
        None, description="Seconds kept for saving at the end of the time limit; grace + 10 when not given."
    )
    export: Annotated[str | tuple[str, ...], Reader(_export)] = Field(
        "NONE", description="Variables of the submitting shell that the job sees: NONE, ALL or a list of names."
    )
    modules: Annotated[tuple[Word, ...], several] = Field(
        (), description="Environment modules, loaded before the agents start."
    )
    container_image: Word | None = Field(None, description="Image that the agents and ranks run in (pyxis).")
    container_mounts: Annotated[tuple[_Mount, ...], several] = Field(
        (), description="What is mounted in it besides the root, like /data:/data:ro."
    )
    container_name: Word | None = Field(
        None, description="Name under which the container is kept and found again on a node."
    )
    container_mount_home: Flag | None = Field(None, description="Whether the home directory is mounted in it.")
    container_remap_root: Flag | None = Field(None, description="Whether one is root in it.")
    container_writable: Flag | None = Field(None, description="Whether its file system can be written.")
    container_entrypoint: Flag | None = Field(None, description="Whether the image's entry point runs first.")
    srun_args: Annotated[tuple[str, ...], Reader(_srun_args)] = Field(
        (), description="More options of the srun that starts the agents."
    )
    extra: Annotated[tuple[tuple[str, str | None], ...], Reader(_extra)] = Field(
        (), description="Any other #SBATCH options: a list or a mapping."
    )


class SlurmSettings(SshOptions):
    """Settings of the cluster's Slurm. Only in clusters.yaml."""

    login: Machine | None = Field(
        None,
        description="Login node, reached over SSH: [user@]name, "
        "or a mapping with name, address, user, port, via, python.",
    )
    conf: Annotated[str, _path] | None = Field(None, description="Path of slurm.conf, when it is not the system's.")
    bin: Annotated[str, _path] | None = Field(
        None, description="Directory of sbatch, squeue and so on, when they are not on the PATH."
    )
    query_timeout: Annotated[Number, seconds(1, 3600)] = Field(
        15.0, description="Seconds after which a silent squeue or sacct counts as down."
    )
    submit_timeout: Annotated[Number, seconds(1, 3600)] = Field(60.0, description="The same for sbatch and scancel.")
    peer_timeout: Annotated[Number, seconds(2, 3600)] = Field(
        30.0, description="Seconds of silence after which a node counts as lost, and ends its own ranks."
    )
    accounting: Flag = Field(True, description="Whether sacct can be asked; false where accounting is off.")

    def program(self, name: str) -> str:
        """Return the path or name of a Slurm command."""
        return f"{self.bin}/{name}" if self.bin else name


class ClusterOptions(SlurmSettings, SlurmOptions):
    """``options:`` of a cluster, for editors; names may be written with hyphens as well."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})


def read_options(
    cluster: Mapping[str, Any],
    job: Mapping[str, Any],
    *,
    cluster_where: str = "",
    job_where: str = "",
    replaced: Collection[str] = (),
) -> SlurmOptions:
    """Return the options of one job: its own over the cluster's, of which the *replaced* ones do not count.

    Raises `SpecError` with the key and its place.
    """
    settings = SlurmSettings.model_fields
    shared = _underscored(cluster, cluster_where)
    base = _read(
        SlurmOptions, {k: v for k, v in shared.items() if k not in settings and k not in replaced}, shared, [*settings]
    )
    given = _underscored(job, job_where)
    for name in given:
        if name in settings:
            what = f"{name!r} describes the cluster, not the job"
            hint = "Set it under `options:` of the cluster in clusters.yaml."
            raise SpecError(what, where=given.document.origin((name,), key=True).where, hint=hint)
    own = _read(SlurmOptions, given, given, [])
    values = {name: getattr(base, name) for name in base.model_fields_set}
    if own.model_fields_set & MEMORY:
        values = {name: value for name, value in values.items() if name not in MEMORY}
    values |= {name: getattr(own, name) for name in own.model_fields_set}
    if own.extra and base.extra:
        values["extra"] = tuple({**dict(base.extra), **dict(own.extra)}.items())
    return SlurmOptions.model_construct(**values)


def read_settings(cluster: Mapping[str, Any], *, where: str = "") -> SlurmSettings:
    """Return the settings among a cluster's options. Raises `SpecError`."""
    given = _underscored(cluster, where)
    known = SlurmSettings.model_fields
    return _read(SlurmSettings, {k: v for k, v in given.items() if k in known}, given, [])


def _underscored(given: Mapping[str, Any], where: str) -> Placed:
    """Return the options with underscores in their names, as in the model, and with their places."""
    document = document_of(given, where)

    def proper(name: str | int) -> str | int:
        return key if (key := str(name).replace("-", "_")) in _NAMES else name

    def rename(places: Mapping[KeyPath, Origin]) -> dict[KeyPath, Origin]:
        return {(proper(path[0]), *path[1:]) if path else path: origin for path, origin in places.items()}

    data = {str(proper(name)): value for name, value in given.items()}
    return Placed(data, Document(data, document.where, rename(document.keys), rename(document.values)), ())


def _read(model: type[_Model], given: Mapping[str, Any], placed: Placed, also_known: Sequence[str]) -> _Model:
    def unknown(name: str) -> str:
        option = name.replace("_", "-")
        valid = [*model.model_fields, *also_known]
        near = nearest(name.replace("-", "_"), valid) or f"; the keys here are {', '.join(valid)}"
        if option in RESERVED:
            return f"{near}; --{option}: {RESERVED[option]}"
        return f"{near}; other options of sbatch go under `extra`"

    return validate_options(model, Placed(given, placed.document, ()), "", unknown=unknown)


_NAMES = {*SlurmOptions.model_fields, *SlurmSettings.model_fields}
