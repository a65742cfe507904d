"""What can be said to Slurm: ``options:`` of a cluster and ``resources.options.slurm`` of a job. Pure.

Every key is checked here, once: a value that would add a line to the batch script, or that contradicts what orc itself
relies on (job name, output, number of tasks), never reaches ``sbatch``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from orc.launchers.backends.slurm.reserved import LIKE_OURS, OURS, OURS_IN_SRUN, SHORT_IN_SRUN
from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.hosts import Access
from orc.launchers.remote.ssh.options import Machine, Reaching
from orc.launchers.spec import grammar

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.heterogeneous import Component
    from orc.launchers.spec.model import Model

_OPTION = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MEMORY = frozenset({"mem", "mem_per_cpu", "mem_per_gpu"})  # one replaces the others
GPU_SPELLINGS = ("gres", "gpus-per-node", "gpus-per-task")
EXCLUSIVE = ("user", "mcs", "topo")
EARLIEST_S = 65535  # before the time limit, that Slurm can send a signal
_GPU_TYPE = re.compile(r"[A-Za-z0-9_.-]+")

Reader = Callable[[Any], Any]
# Where options stand, for messages: one place for all, or the place of each by its name.
Where = str | Callable[[str], str]


def _line(value: Any) -> str:
    text = grammar.line(grammar.scalar_text(value).strip())
    if not text:
        raise ValueError("must not be empty")
    return text


def _word(value: Any) -> str:
    text = _line(value)
    if any(character.isspace() for character in text):
        raise ValueError(f"{text!r} must not contain blanks")
    return text


def _path(value: Any) -> str:
    text = _line(value)
    if not text.startswith("/"):
        raise ValueError(f"{text!r} must be an absolute path on the cluster")
    return text


def _gpu_type(value: Any) -> str:
    text = _word(value)
    if not _GPU_TYPE.fullmatch(text):
        raise ValueError(f"{text!r} is not a GPU type; write for example a100")
    return text


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, not {value!r}")
    return value


def _all_memory(value: Any) -> str:
    if value not in (0, "0", "all") or isinstance(value, bool):
        raise ValueError(f"only 0 (all the memory of each node) can be given here, not {value!r}; use resources.memory")
    return "0"


def _gpus_as(value: Any) -> str:
    if value not in GPU_SPELLINGS:
        raise ValueError(f"expected {', '.join(GPU_SPELLINGS[:-1])} or {GPU_SPELLINGS[-1]}, not {value!r}")
    return str(value)


def _mount(value: Any) -> str:
    text = _word(value)
    if not re.fullmatch(r"[^:,]+(?::[^:,]+){0,2}", text):
        raise ValueError(f"{text!r} is not a mount; write for example /data:/data:ro")
    return text


def _exclusive(value: Any) -> bool | str:
    if isinstance(value, bool) or value in EXCLUSIVE:
        return bool(value) if isinstance(value, bool) else str(value)
    raise ValueError(f"expected true, false, {', '.join(EXCLUSIVE[:-1])} or {EXCLUSIVE[-1]}, not {value!r}")


def _whole(minimum: int, maximum: int = 2**31 - 1) -> Reader:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise ValueError(f"expected a whole number from {minimum} to {maximum}, not {value!r}")
        return value

    return read


def _seconds(minimum: float, maximum: float) -> Reader:
    def read(value: Any) -> float:
        number = float(grammar.seconds(value))
        if not minimum <= number <= maximum:
            raise ValueError(f"expected {minimum:g} to {maximum:g} seconds, not {value!r}")
        return number

    return read


def _list_of(item: Reader) -> Reader:
    def read(value: Any) -> tuple[Any, ...]:
        values = value if isinstance(value, (list, tuple)) else [value]
        return tuple(item(v) for v in values)

    return read


def _gres(value: Any) -> tuple[str, ...]:
    """``[nvme:1, shard:2]`` or ``nvme:1,shard:2``: one by one, so that each can be looked at."""
    words: tuple[str, ...] = _list_of(_word)(value)
    found = tuple(one for word in words for one in word.split(","))
    if not all(found):
        raise ValueError(f"{value!r} has an empty entry; write for example nvme:1,shard:2")
    return found


def _comma_list(value: Any) -> str:
    """``[node1, node2]`` or ``node[1-2]``: Slurm wants one word."""
    return ",".join(_list_of(_word)(value))


def _export(value: Any) -> str | tuple[str, ...]:
    if value in ("NONE", "ALL"):
        return str(value)
    names: tuple[str, ...] = _list_of(_word)(value)
    bad = [name for name in names if not _VARIABLE.fullmatch(name)]
    if bad:
        raise ValueError(f"{bad[0]!r} is not the name of a variable; give NONE, ALL or a list of names")
    return names or "NONE"


def _srun_args(value: Any) -> tuple[str, ...]:
    words: tuple[str, ...] = _list_of(_line)(value)
    for word in words:
        if not word.startswith("-"):
            raise ValueError(f"{word!r} is not an option; write every option as one word, like --cpu-bind=none")
        name = word[2:].partition("=")[0] if word.startswith("--") else SHORT_IN_SRUN.get(word[1:2], "")
        if name and (ours := _meant(name, OURS_IN_SRUN)):
            raise ValueError(f"{word} is set by orc: {OURS_IN_SRUN[ours]}")
        if name.startswith("container-"):
            raise ValueError(f"{word}: containers have keys of their own, like `container_image`")
    return words


def _meant(option: str, known: Collection[str]) -> str | None:
    """Which of *known* Slurm takes *option* for: its names may be cut short."""
    return option if option in known else next((name for name in known if name.startswith(option)), None)


def _extra(value: Any) -> tuple[tuple[str, str | None], ...]:
    """Other ``#SBATCH`` options, as ``{hint: nomultithread, spread-job: true}`` or ``["--hint=nomultithread"]``."""
    pairs: list[tuple[str, str | None]] = []
    if isinstance(value, Mapping):
        for name, given in value.items():
            option = str(name).removeprefix("--").replace("_", "-")
            if given is False or given is None:
                continue
            pairs.append((option, None if given is True else _line(given)))
    elif isinstance(value, (list, tuple, str)):
        for item in [value] if isinstance(value, str) else value:
            text = _line(item).removeprefix("#SBATCH").strip()
            if not text.startswith("--"):
                raise ValueError(f"{text!r} is not a long option; write for example --hint=nomultithread")
            option, equals, given = text[2:].partition("=")
            pairs.append((option, _line(given) if equals else None))
    else:
        raise ValueError("expected a list of --options, or a mapping")
    keys = [f.name.replace("_", "-") for f in dataclasses.fields(SlurmOptions)]
    for option, _ in pairs:
        if not _OPTION.fullmatch(option):
            raise ValueError(f"--{option} is not an option; write for example --hint=nomultithread")
        if option in LIKE_OURS:
            continue
        if option not in keys and (ours := _meant(option, OURS)):
            raise ValueError(f"--{option} is set by orc: {OURS[ours]}")
        if key := _meant(option, keys):
            raise ValueError(f"--{option} has a key of its own: `{key.replace('-', '_')}`")
    return tuple(pairs)


def _components(value: Any) -> tuple[Component, ...]:
    from orc.launchers.backends.slurm.heterogeneous import read_components

    return read_components(value)


def _login(value: Any) -> Machine:
    if not isinstance(value, (str, Mapping)):
        raise ValueError(f"expected a host or a mapping like {{name: login1, user: me}}, not {value!r}")
    return cast(Machine, _modelled(Machine, value))


def _reaching(name: str) -> Reader:
    return lambda value: getattr(_modelled(Reaching, {name: value}), name)


def _modelled(kind: type[Model], value: Any) -> Model:
    """What the SSH options make of *value*. Raises `ValueError` that lists every mistake."""
    from pydantic_core import ValidationError

    from orc.launchers.spec.model import fields
    from orc.launchers.spec.problems import choose, translate
    from orc.launchers.spec.source import Document

    try:
        return kind.model_validate(value)
    except ValidationError as error:
        document = Document(dict(value) if isinstance(value, Mapping) else {}, "", {}, {})
        known = [option.name for option in fields(kind)]
        problems = translate(error, document, lambda _, name: choose(name, known))
        single = kind is Reaching  # its key is named already
        raise ValueError("; ".join(problem.what if single else problem.text for problem in problems)) from None


def _key(read: Reader, default: Any, doc: str) -> Any:
    return field(default=default, metadata={"read": read, "doc": doc})


@dataclass(frozen=True)
class SlurmOptions:
    """What goes into one job. A job's own value replaces the cluster's."""

    partition: str | None = _key(_comma_list, None, "Partition, or several: the first that can start the job is taken.")
    account: str | None = _key(_word, None, "Account that is charged.")
    qos: str | None = _key(_word, None, "Quality of service.")
    reservation: str | None = _key(_comma_list, None, "Reservation to run in.")
    constraint: str | None = _key(_word, None, "Node features, like a100&nvlink.")
    nodelist: str | None = _key(_comma_list, None, "Nodes that must be part of the job.")
    exclude: str | None = _key(_comma_list, None, "Nodes that must not.")
    exclusive: bool | str = _key(_exclusive, False, "Whole nodes: true, user, mcs or topo.")
    gpu_type: str | None = _key(_gpu_type, None, "Type of the GPUs that resources.gpus_per_node asks for, like a100.")
    gpus_as: str = _key(_gpus_as, "gres", "How GPUs are asked for: gres, gpus-per-node or gpus-per-task.")
    gres: tuple[str, ...] = _key(_gres, (), "Generic resources per node beside the GPUs.")
    licenses: str | None = _key(_comma_list, None, "Licenses.")
    mem_per_cpu: str | None = _key(grammar.memory, None, "Memory per CPU core, instead of resources.memory (per node).")
    mem_per_gpu: str | None = _key(grammar.memory, None, "Memory per GPU, instead of resources.memory (per node).")
    mem: str | None = _key(_all_memory, None, "0: all the memory of each node, instead of resources.memory.")
    heterogeneous: tuple[Component, ...] = _key(
        _components, (), "Several sorts of nodes in one job: a list of components with nodes of their own."
    )
    dependency: str | None = _key(_word, None, "Like afterok:1234; a dependency that cannot be met ends the job.")
    begin: str | None = _key(_word, None, "Earliest start, like now+1hour or 2030-01-01T08:00.")
    nice: int | None = _key(_whole(-2147483645, 2147483645), None, "Lower the priority by this much.")
    wckey: str | None = _key(_word, None, "Workload characterisation key.")
    mail_user: str | None = _key(_word, None, "Who gets mail.")
    mail_type: str | None = _key(_comma_list, None, "When: [BEGIN, END, FAIL, REQUEUE].")
    comment: str | None = _key(_line, None, "Text put behind the marker in the job's comment.")
    requeue: bool | None = _key(
        _truth,
        None,
        "Let Slurm run the same job again after preemption or node failure; follows retry.on when not given.",
    )
    max_requeues: int = _key(_whole(0, 100_000), 50, "How often a job may put itself back in the queue after saving.")
    signal_lead: float | None = _key(
        _seconds(0, EARLIEST_S),
        None,
        "Seconds kept for saving at the end of the time limit; grace + 10 when not given.",
    )
    export: str | tuple[str, ...] = _key(
        _export, "NONE", "Variables of the submitting shell that the job sees: NONE, ALL or a list of names."
    )
    modules: tuple[str, ...] = _key(_list_of(_word), (), "Environment modules, loaded before the agents start.")
    container_image: str | None = _key(_word, None, "Image that the agents and ranks run in (pyxis).")
    container_mounts: tuple[str, ...] = _key(
        _list_of(_mount), (), "What is mounted in it besides the root, like /data:/data:ro."
    )
    container_name: str | None = _key(_word, None, "Name under which the container is kept and found again on a node.")
    container_mount_home: bool | None = _key(_truth, None, "Whether the home directory is mounted in it.")
    container_remap_root: bool | None = _key(_truth, None, "Whether one is root in it.")
    container_writable: bool | None = _key(_truth, None, "Whether its file system can be written.")
    container_entrypoint: bool | None = _key(_truth, None, "Whether the image's entry point runs first.")
    srun_args: tuple[str, ...] = _key(_srun_args, (), "More options of the srun that starts the agents.")
    extra: tuple[tuple[str, str | None], ...] = _key(_extra, (), "Any other #SBATCH options: a list or a mapping.")


@dataclass(frozen=True)
class SlurmSettings:
    """How the cluster's Slurm is spoken to. Only in clusters.yaml."""

    login: Machine | None = _key(  # noqa: RUF009 - a field
        _login,
        None,
        "Login node, reached over SSH: [user@]name, or a mapping with name, address, user, port, via, python.",
    )
    host_keys: str = _key(
        _reaching("host_keys"), "strict", "Whether a login node with an unknown key is refused: strict or accept-new."
    )
    ssh_config: str | None = _key(_reaching("ssh_config"), None, "SSH configuration instead of ~/.ssh/config.")
    connect_timeout: float = _key(
        _reaching("connect_timeout"), 10.0, "Seconds until a login node that does not answer counts as silent."
    )
    conf: str | None = _key(_path, None, "Path of slurm.conf, when it is not the system's.")
    bin: str | None = _key(_path, None, "Directory of sbatch, squeue and so on, when they are not on the PATH.")
    query_timeout: float = _key(_seconds(1, 3600), 15.0, "Seconds after which a silent squeue or sacct counts as down.")
    submit_timeout: float = _key(_seconds(1, 3600), 60.0, "The same for sbatch and scancel.")
    peer_timeout: float = _key(
        _seconds(2, 3600), 30.0, "Seconds of silence after which a node counts as lost, and ends its own ranks."
    )
    accounting: bool = _key(_truth, True, "Whether sacct can be asked; false where accounting is off.")

    @property
    def access(self) -> Access:
        """How the login node is reached."""
        return Access(self.host_keys, self.ssh_config, self.connect_timeout)

    def program(self, name: str) -> str:
        """How a Slurm command is called."""
        return f"{self.bin}/{name}" if self.bin else name


def read_options(
    cluster: Mapping[str, Any], job: Mapping[str, Any], *, cluster_where: Where = "", job_where: Where = ""
) -> SlurmOptions:
    """The options of one job: its own over the cluster's. Raises `SpecError` that names the key and the place."""
    settings = {f.name for f in dataclasses.fields(SlurmSettings)}
    values = _read(SlurmOptions, {k: v for k, v in cluster.items() if k not in settings}, cluster_where, settings)
    for name in job:
        if name in settings:
            raise SpecError(
                f"{name!r} describes the cluster, not the job",
                where=_at(job_where, name),
                hint="Set it under `options:` of the cluster in clusters.yaml.",
            )
    own = _read(SlurmOptions, job, job_where, set())
    if MEMORY & own.keys():
        values = {name: value for name, value in values.items() if name not in MEMORY}
    if own.get("extra") and values.get("extra"):
        own["extra"] = tuple({**dict(values["extra"]), **dict(own["extra"])}.items())
    return SlurmOptions(**{**values, **own})


def read_settings(cluster: Mapping[str, Any], *, where: Where = "") -> SlurmSettings:
    """The settings among a cluster's options. Raises `SpecError`."""
    known = {f.name for f in dataclasses.fields(SlurmSettings)}
    return SlurmSettings(**_read(SlurmSettings, {k: v for k, v in cluster.items() if k in known}, where, set()))


def _at(where: Where, name: str) -> str:
    return where if isinstance(where, str) else where(name)


def _read(kind: type, given: Mapping[str, Any], where: Where, also_known: set[str]) -> dict[str, Any]:
    """The checked values of *given*; ``null`` means not given."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values = {}
    for name, value in given.items():
        key = str(name).replace("-", "_")
        if key not in fields:
            from orc.launchers.spec.problems import nearest

            valid = [*fields, *sorted(also_known)]
            other = "Other options of sbatch go under `extra`."
            raise SpecError(
                f"unknown key {name!r}" + (nearest(key, valid) or f"; the keys here are {', '.join(valid)}"),
                where=_at(where, name),
                hint=f"--{key.replace('_', '-')}: {OURS[key.replace('_', '-')]}."
                if key.replace("_", "-") in OURS
                else other,
            )
        if value is None:
            continue
        try:
            values[key] = fields[key].metadata["read"](value)
        except ValueError as error:
            raise SpecError(f"{name}: {error}", where=_at(where, name)) from None
    return values
