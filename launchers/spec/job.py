"""What a job file says, checked: `JobSpec` and its parts."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from pydantic_core import core_schema as cs

from orc.launchers.spec import grammar
from orc.launchers.spec.environment import Environment
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.model import Model, model, setting
from orc.launchers.spec.network import Network
from orc.runtime.config import JOB_KEYS, KEYS, check

TEXT = cs.no_info_plain_validator_function(grammar.scalar_text, json_schema_input_schema=cs.str_schema())
LINE = cs.no_info_plain_validator_function(grammar.line, json_schema_input_schema=cs.str_schema())
_TEXTS = cs.tuple_schema([TEXT], variadic_item_index=0)
_MAPPING = cs.dict_schema(cs.str_schema(strict=True), cs.any_schema())
_MAPPINGS = cs.dict_schema(cs.str_schema(strict=True), _MAPPING)


def _optional(schema: cs.CoreSchema) -> cs.CoreSchema:
    return cs.nullable_schema(schema)


def _whole(minimum: int, maximum: int | None = None) -> cs.CoreSchema:
    return cs.int_schema(ge=minimum, le=maximum, strict=True)


def _one_of(*values: str) -> cs.CoreSchema:
    return cs.literal_schema(list(values))


def _read(function: Any, *json_types: cs.CoreSchema) -> cs.CoreSchema:
    """A value that one of the grammar's functions reads; *json_types* is what a JSON schema says about it."""
    shown = json_types[0] if len(json_types) == 1 else cs.union_schema(list(json_types))
    return cs.no_info_plain_validator_function(function, json_schema_input_schema=shown)


_ENV_NAME = _read(grammar.env_name, cs.str_schema())
ENV = cs.dict_schema(_ENV_NAME, TEXT)
_DURATION = _read(grammar.seconds, cs.float_schema(ge=0), cs.str_schema())


@model
class Launcher(Model):
    """How the processes of one node are started."""

    kind: str = setting(
        cs.str_schema(min_length=1, strict=True), default="torchrun", doc="torchrun, mpirun, deepspeed, xla or python."
    )
    options: Mapping[str, Any] = setting(_MAPPING, default_factory=dict, doc="Options of that launcher.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """``launcher: python`` is short for ``launcher: {kind: python}``."""
        return {"kind": data} if isinstance(data, str) else data


@model
class Resources(Model):
    """What the job needs. Memory and time are normalised texts; the properties give numbers."""

    nodes: int | str = setting(
        _read(grammar.nodes, cs.int_schema(ge=1), cs.str_schema(pattern=r"^\d+(:\d+)?$")),
        default=1,
        doc="Number of nodes, or min:max.",
    )
    procs_per_node: int | None = setting(
        _optional(_whole(1, 4096)),
        default=None,
        doc="Processes per node; one per GPU, or 1 without GPUs, when not given.",
    )
    gpus_per_node: int = setting(_whole(0, 1024), default=0, doc="GPUs per node.")
    cpus_per_proc: int | None = setting(_optional(_whole(1, 4096)), default=None, doc="CPU cores per process.")
    memory: str | None = setting(
        _optional(_read(grammar.memory, cs.str_schema())), default=None, doc="Memory per node, like 16G."
    )
    time: str | None = setting(
        _optional(_read(grammar.time_limit, cs.int_schema(ge=1), cs.str_schema())),
        default=None,
        doc="Time limit of one attempt: 1:30:00, 90m, 2h, or seconds.",
    )
    options: Mapping[str, Mapping[str, Any]] = setting(
        _MAPPINGS, default_factory=dict, doc="More options per kind of backend, like {slurm: {partition: gpu}}."
    )

    @property
    def min_nodes(self) -> int:
        """The smallest number of nodes the job runs on."""
        return int(str(self.nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes the job runs on."""
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def nproc(self) -> int:
        """Processes per node."""
        return self.procs_per_node or self.gpus_per_node or 1

    @property
    def memory_bytes(self) -> int | None:
        """Memory per node in bytes."""
        return grammar.memory_bytes(self.memory) if self.memory else None

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds."""
        return int(grammar.seconds(self.time)) if self.time else None


@model
class Workdir(Model):
    """The directory that travels with the job."""

    path: str = setting(TEXT, default=".", doc="Relative to the job file.")
    exclude: tuple[str, ...] = setting(_TEXTS, default=(), doc="Patterns (gitignore syntax) of what stays at home.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """``workdir: src`` is short for ``workdir: {path: src}``."""
        return {"path": data} if isinstance(data, str) else data

    def check(self) -> None:
        """Refuses an empty path."""
        if not self.path.strip():
            raise LocatedError((("path",), "must not be empty; the directory of the job file is ."))


@model
class Checkpoint(Model):
    """Where and when the runtime saves."""

    dir: str | None = setting(
        _optional(TEXT), default=None, doc="Absolute, or below the job's directory on the cluster."
    )
    every: int | None = setting(_optional(_whole(1)), default=None, doc="Optimizer steps between automatic saves.")
    keep: int | None = setting(_optional(_whole(1)), default=None, doc="Committed checkpoints to keep.")
    resume: str = setting(_one_of("auto", "never"), default="auto", doc="Whether a new attempt resumes.")


@model
class Retry(Model):
    """When a failed attempt is followed by another."""

    max_attempts: int = setting(_whole(1, 1000), default=3, doc="Attempts in all.")
    on: tuple[str, ...] = setting(
        cs.tuple_schema([_one_of("crash", "node_failure", "preempted", "timeout")], variadic_item_index=0),
        default=("node_failure", "preempted"),
        doc="Causes that are worth another attempt.",
    )
    backoff: float = setting(
        _DURATION, default=10.0, doc="Seconds before the second attempt; doubles each time, 600 at most."
    )

    @classmethod
    def before(cls, data: Any) -> Any:
        """``on: crash`` is short for ``on: [crash]``."""
        if isinstance(data, Mapping) and isinstance(data.get("on"), str):
            return {**data, "on": [data["on"]]}
        return data


def _name(value: Any) -> str:
    text = grammar.scalar_text(value).strip()
    if not any(character.isascii() and character.isalnum() for character in text):
        raise ValueError(f"{text!r} needs at least one letter a-z or digit: job ids are made from it")
    if len(text) > 128 or not text.isprintable():
        raise ValueError("a name is one printable line of at most 128 characters")
    return text


def _script(value: Any) -> str:
    text = grammar.scalar_text(value)
    if not text.strip():
        raise ValueError("must not be empty")
    if posixpath.isabs(text):
        raise ValueError(f"{text!r} must be relative to the workdir: only the workdir travels to the nodes")
    normal = posixpath.normpath(text)
    if normal == ".." or normal.startswith("../"):
        raise ValueError(f"{text!r} lies outside the workdir: only the workdir travels to the nodes")
    # Python would take a file name that starts with a dash for an option.
    return f"./{normal}" if normal.startswith("-") else normal


def _command(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, (list, tuple)):
        words = tuple(grammar.texts(value))
        if not words or not words[0]:
            raise ValueError("expected a program and its arguments")
        return words
    if not isinstance(value, str):
        raise ValueError("expected a shell command, or a list of a program and its arguments")
    text = grammar.scalar_text(value)
    if not text.strip():
        raise ValueError("must not be empty")
    if (word := text.strip()) in ("torchrun", "mpirun", "deepspeed", "python"):
        raise ValueError(f"is the program of one rank; to start the ranks with {word}, write `launcher: {word}`")
    return text


def _args(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return grammar.flags(value)
    if isinstance(value, (list, tuple)):
        return tuple(grammar.texts(value))
    raise ValueError("expected a list of words such as [--lr, 0.1], or a mapping such as {lr: 0.1}")


def shell_lines(value: Any) -> tuple[str, ...]:
    """The lines of ``setup``: one text, or a list; blank ones are dropped."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)):
        raise ValueError("expected shell lines: one text or a list")
    return tuple(line for line in grammar.texts(lines) if line.strip())


def _runtime_field(key: str) -> cs.TypedDictField:
    def read(value: Any) -> Any:
        return None if value is None else check(key, value)

    schema = cs.no_info_plain_validator_function(read, json_schema_input_schema=cs.any_schema())
    return cs.typed_dict_field(schema, required=False, metadata={"pydantic_js_updates": {"description": KEYS[key].doc}})


_RUNTIME = cs.typed_dict_schema({key: _runtime_field(key) for key in JOB_KEYS}, extra_behavior="forbid")
_PROGRAMS = ("script", "module", "command")


@model
class JobSpec(Model):
    """One job, as its file says it. Immutable; `model_dump(mode="json")` and `model_validate` are inverse."""

    name: str = setting(_read(_name, cs.str_schema(max_length=128)), doc="What people call the job.")
    script: str | None = setting(
        _optional(_read(_script, cs.str_schema())), default=None, doc="A Python file in the workdir."
    )
    module: str | None = setting(
        _optional(_read(grammar.module_name, cs.str_schema())), default=None, doc="A Python module, as in python -m."
    )
    command: str | tuple[str, ...] | None = setting(
        _optional(_read(_command, cs.str_schema(), cs.list_schema(cs.str_schema()))),
        default=None,
        doc="Any program: a text for /bin/sh -c, or a list of words.",
    )
    args: tuple[str, ...] = setting(
        _read(_args, cs.list_schema(cs.any_schema()), cs.dict_schema(cs.str_schema(), cs.any_schema())),
        default=(),
        doc="The program's arguments: a list of words, or a mapping of flags.",
    )
    cluster: str = setting(cs.str_schema(min_length=1, strict=True), default="local", doc="A name in clusters.yaml.")
    launcher: Launcher = setting(Launcher.core_schema, default_factory=Launcher, doc="How ranks are started.")
    resources: Resources = setting(Resources.core_schema, default_factory=Resources, doc="What the job needs.")
    env: Mapping[str, str] = setting(ENV, default_factory=dict, doc="Environment variables of every rank.")
    secrets: tuple[str, ...] = setting(
        cs.tuple_schema([_ENV_NAME], variadic_item_index=0),
        default=(),
        doc="Names of variables whose values are looked up at submission and never stored.",
    )
    core_dumps: bool = setting(
        cs.bool_schema(strict=True),
        default=False,
        doc="Let ranks of a job with secrets dump core; a core file holds their values.",
    )
    setup: tuple[str, ...] = setting(
        _read(shell_lines, cs.str_schema(), cs.list_schema(cs.str_schema())),
        default=(),
        doc="Shell lines that run once per node before the ranks.",
    )
    environment: Environment = setting(
        Environment.core_schema, default_factory=Environment, doc="Where the ranks' Python comes from."
    )
    network: Network = setting(Network.core_schema, default_factory=Network, doc="Which network the nodes use.")
    workdir: Workdir = setting(Workdir.core_schema, default_factory=Workdir, doc="The directory that travels.")
    runtime: Mapping[str, Any] = setting(_RUNTIME, default_factory=dict, doc="Settings of orc.runtime.")
    checkpoint: Checkpoint = setting(Checkpoint.core_schema, default_factory=Checkpoint, doc="Saving and resuming.")
    retry: Retry = setting(Retry.core_schema, default_factory=Retry, doc="When to try again.")
    grace: float = setting(_DURATION, default=30.0, doc="Seconds between SIGTERM and SIGKILL.")
    tags: Mapping[str, str] = setting(
        cs.dict_schema(cs.str_schema(min_length=1, strict=True), TEXT), default_factory=dict, doc="To find jobs by."
    )

    @property
    def argv(self) -> tuple[str, ...]:
        """The arguments of the program, as words."""
        return self.args

    def check(self) -> None:
        """Exactly one program; no variable both in ``env`` and ``secrets``."""
        problems: list[tuple[grammar.Path, str]] = []
        given = [key for key in _PROGRAMS if getattr(self, key) is not None]
        if not given:
            problems.append(((), "nothing to run; give one of script, module, command"))
        for key in given[1:]:
            problems.append(((key,), f"only one of script, module, command can be given; {given[0]} is given too"))
        if (kind := self.launcher.kind) in ("torchrun", "mpirun", "deepspeed") and self._starts(kind):
            what = f"starts {kind} inside {kind}, which starts the ranks already; give `script`, or `launcher: python`"
            problems.append((("command",), what))
        for known in KEYS.values():
            if known.variable in self.env:  # what the ranks would refuse is refused here
                try:
                    known.parse(self.env[known.variable])
                except ValueError as error:
                    problems.append((("env", known.variable), str(error)))
        for index, name in enumerate(self.secrets):
            if name in self.env:
                problems.append((("env", name), "is also listed in secrets"))
            if name in self.secrets[:index]:
                problems.append((("secrets", index), f"{name} is listed twice"))
        if problems:
            raise LocatedError(*problems)

    def _starts(self, program: str) -> bool:
        """Whether the first word of the command is *program*, by whatever path."""
        words = self.command.split() if isinstance(self.command, str) else self.command or ("",)
        return posixpath.basename(words[0]) == program
