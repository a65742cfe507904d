"""The job file's model: `JobSpec` and its sections."""

from __future__ import annotations

import importlib
import posixpath
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator
from typing_extensions import TypedDict

from orc.launchers.spec import grammar
from orc.launchers.spec.environment import Environment, Network
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.notify import Subscriptions
from orc.launchers.spec.options import Duration, Flag, FrozenModel, Name, ShellLines, Text, Variables, Whole, several
from orc.launchers.spec.relations import DependsOn, Inputs, Outputs
from orc.launchers.spec.sweep import Array, Sweep
from orc.runtime.core import fp8_settings, megatron_keys, parallelism_settings
from orc.runtime.core.config import JOB_DOCS, KEYS, check

_LONGEST_PATTERN = 500


def _pattern(value: Any) -> str:
    """Return a regular expression that can be searched for in bounded time."""
    text = grammar.line(value)
    if not text or len(text) > _LONGEST_PATTERN:
        raise ValueError(f"expected a regular expression of 1 to {_LONGEST_PATTERN} characters")
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if _repeats_itself(text):
        raise ValueError(f"{text!r} repeats a repetition, as in (a+)+: a search could take for ever")
    if re.search(text, ""):
        raise ValueError(f"{text!r} matches every line")
    return text


def _repeats_itself(pattern: str) -> bool:
    """Return True where an unbounded repeat is within another one, as in ``(a+)+``: the usual way to run for ever."""
    parser = importlib.import_module("re._parser")

    def visit(part: Any, inside: bool) -> bool:
        if not isinstance(part, (list, tuple, parser.SubPattern)):
            return False
        if isinstance(part, tuple) and len(part) == 3 and part[1] is parser.MAXREPEAT:  # (least, most, what)
            return inside or visit(part[2], True)
        return any(visit(each, inside) for each in part)

    return visit(parser.parse(pattern), False)


class LogRule(FrozenModel):
    """Rule about a line in the log of a failed attempt."""

    pattern: Annotated[str, BeforeValidator(_pattern)] = Field(description="Regular expression, searched in each line.")
    action: Literal["retry", "fail", "exclude_node"] = Field(description="What a line that matches means.")


class Retry(FrozenModel):
    """Policy for the attempts after a failed one."""

    max_attempts: Whole = Field(3, ge=1, le=1000, description="Attempts in all.")
    on: Annotated[tuple[Literal["crash", "node_failure", "preempted", "timeout"], ...], several] = Field(
        ("node_failure", "preempted"), description="Causes that are worth another attempt."
    )
    backoff: Duration = Field(10, description="Seconds before the second attempt; doubles each time, 600 at most.")

    on_log: tuple[LogRule, ...] = Field(
        (), max_length=32, description="Rules about what a failed attempt has logged; the first that matches decides."
    )


def _job_name(value: Any) -> str:
    text = grammar.scalar_text(value).strip()
    if not any(character.isascii() and character.isalnum() for character in text):
        raise ValueError(f"{text!r} needs at least one letter a-z or digit: job ids are made from it")
    if len(text) > 128 or not text.isprintable():
        raise ValueError("a name is one printable line of at most 128 characters")
    return text


def _script(value: Any) -> str:
    text = grammar.scalar_text(value)
    if posixpath.isabs(text):
        raise ValueError(f"{text!r} must be relative to the workdir: only the workdir travels to the nodes")
    normal = grammar.within_workdir(text)
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


class Launcher(FrozenModel):
    """Launcher of the processes of one node, and its options."""

    short_form = "kind"

    kind: Name = Field("torchrun", description="The command that starts the ranks; see docs/reference/commands.md.")
    options: dict[str, Any] = Field({}, description="Options of that launcher.")


class Resources(FrozenModel):
    """Resources of the job. Memory and time are normalised texts; the properties give numbers."""

    nodes: Annotated[int | str, BeforeValidator(grammar.nodes)] = Field(1, description="Number of nodes, or min:max.")
    procs_per_node: Annotated[Whole, Field(ge=1, le=4096)] | None = Field(
        None, description="Processes per node; one per GPU, or 1 without GPUs, when not given."
    )
    gpus_per_node: Whole = Field(0, ge=0, le=1024, description="GPUs per node.")
    cpus_per_proc: Annotated[Whole, Field(ge=1, le=4096)] | None = Field(None, description="CPU cores per process.")
    memory: Annotated[str, BeforeValidator(grammar.memory)] | None = Field(
        None, description="Memory per node, like 16G."
    )
    time: Annotated[str, BeforeValidator(grammar.time_limit, json_schema_input_type=int | str)] | None = Field(
        None, description="Time limit of one attempt: 1:30:00, 90m, 2h, or seconds."
    )
    options: dict[str, dict[str, Any]] = Field(
        {}, description="More options per kind of backend, like {slurm: {partition: gpu}}."
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


class Workdir(FrozenModel):
    """The directory that travels with the job."""

    short_form = "path"

    path: Text = Field(".", description="Relative to the job file.")
    exclude: tuple[Text, ...] = Field((), description="Patterns (gitignore syntax) of what stays at home.")

    limit: Annotated[str, BeforeValidator(grammar.memory)] | None = Field(
        None, description="Size above which `orc submit` asks first, like 10G; 2 GB when not given."
    )

    @field_validator("path")
    @classmethod
    def _given(cls, path: str) -> str:
        if not path.strip():
            raise ValueError("must not be empty; the directory of the job file is .")
        return path


class Checkpoint(FrozenModel):
    """Place and interval of the runtime's checkpoints."""

    dir: Text | None = Field(None, description="Absolute, or below the job's directory on the cluster.")
    every: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Optimizer steps between automatic saves.")
    keep: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Committed checkpoints to keep.")
    resume: Literal["auto", "never"] = Field("auto", description="Whether a new attempt resumes.")


def _runtime_value(key: str) -> Any:
    def read(value: Any) -> Any:
        return None if value is None else check(key, value)

    return Annotated[Any, BeforeValidator(read), Field(description=JOB_DOCS[key])]


if TYPE_CHECKING:
    Runtime = dict[str, Any]
else:
    Runtime = TypedDict("Runtime", {key: _runtime_value(key) for key in JOB_DOCS}, total=False)
    Runtime.__pydantic_config__ = ConfigDict(extra="forbid")
PROGRAMS = ("script", "module", "command")


class JobSpec(FrozenModel):
    """Job, as its file describes it. Immutable; `model_dump(mode="json")` and `model_validate` are inverse."""

    name: Annotated[str, BeforeValidator(_job_name), Field(max_length=128)] = Field(
        description="What people call the job."
    )
    script: Annotated[str, BeforeValidator(_script)] | None = Field(None, description="A Python file in the workdir.")
    module: Annotated[str, BeforeValidator(grammar.module_name)] | None = Field(
        None, description="A Python module, as in python -m."
    )
    command: Annotated[str | tuple[str, ...], BeforeValidator(_command)] | None = Field(
        None, description="Any program: a text for /bin/sh -c, or a list of words."
    )
    args: Annotated[tuple[str, ...], BeforeValidator(_args, json_schema_input_type=list[Any] | dict[str, Any])] = Field(
        (), description="The program's arguments: a list of words, or a mapping of flags."
    )
    cluster: Name = Field("local", description="A name in clusters.yaml.")
    launcher: Launcher = Field(default_factory=Launcher.model_construct, description="How ranks are started.")
    resources: Resources = Field(default_factory=Resources.model_construct, description="What the job needs.")
    env: Variables = Field({}, description="Environment variables of every rank.")
    secrets: tuple[Annotated[str, BeforeValidator(grammar.env_name)], ...] = Field(
        (), description="Names of variables whose values are looked up at submission and never stored."
    )
    core_dumps: Flag = Field(
        False, description="Let ranks of a job with secrets dump core; a core file holds their values."
    )
    setup: ShellLines = Field((), description="Shell lines that run once per node before the ranks.")
    environment: Environment = Field(
        default_factory=Environment.model_construct, description="Where the ranks' Python comes from."
    )
    network: Network = Field(default_factory=Network.model_construct, description="Which network the nodes use.")
    workdir: Workdir = Field(default_factory=Workdir.model_construct, description="The directory that travels.")
    runtime: Runtime = Field({}, description="Settings of orc.runtime.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint.model_construct, description="Saving and resuming.")
    retry: Retry = Field(default_factory=Retry.model_construct, description="When to try again.")
    deadline: Annotated[float | str, BeforeValidator(grammar.deadline, json_schema_input_type=int | str)] | None = (
        Field(None, description="When the job is cancelled, queued or not: a duration from its submission, or a time.")
    )
    priority: Whole = Field(0, ge=-100, le=100, description="Higher goes first; a point is worth an hour of waiting.")
    project: Name | None = Field(None, max_length=64, description="Whose quotas it counts against.")
    grace: Duration = Field(30, description="Seconds between SIGTERM and SIGKILL.")
    tags: dict[Name, Text] = Field({}, description="To find jobs by.")
    depends_on: DependsOn = Field((), description="Jobs that must have ended before this one starts: JOB[:CONDITION].")
    sweep: Sweep | None = Field(None, description="A job for each combination of values of some keys.")
    array: Array | None = Field(None, description="So many jobs, told apart by ORC_ARRAY_TASK_ID; or their indices.")
    max_parallel: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="How many jobs of the sweep, array or pipeline run at a time."
    )
    inputs: Inputs = Field({}, description="Artefacts of other jobs, by name: JOB.OUTPUT.")
    outputs: Outputs = Field({}, description="Files and directories that other jobs can take, by name.")
    notify: Subscriptions = Field((), description="Who is told when the job starts, ends, fails, is requeued, stalls.")

    @property
    def argv(self) -> tuple[str, ...]:
        """The arguments of the program, as words."""
        return self.args

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that there is exactly one program, and no variable both in ``env`` and ``secrets``."""
        problems: list[tuple[grammar.Path, str]] = []
        given = [key for key in PROGRAMS if getattr(self, key) is not None]
        if not given:
            problems.append(((), "nothing to run; give one of script, module, command"))
        for key in given[1:]:
            problems.append(((key,), f"only one of script, module, command can be given; {given[0]} is given too"))
        if (kind := self.launcher.kind) in ("torchrun", "mpirun", "deepspeed") and self._starts(kind):
            what = f"starts {kind} inside {kind}, which starts the ranks already; give `script`, or `launcher: python`"
            problems.append((("command",), what))
        if self.sweep is not None and self.array is not None:
            problems.append((("array",), "only one of sweep and array can be given"))
        for known in KEYS.values():
            if known.variable in self.env:  # what the ranks would refuse is refused here
                try:
                    known.parse(self.env[known.variable])
                except ValueError as error:
                    problems.append((("env", known.variable), str(error)))
        found = (self._precision_problem(), self._layout_problem(), self._megatron_problem())
        problems += filter(None, found)
        for index, name in enumerate(self.secrets):
            if name in self.env:
                problems.append((("env", name), "is also listed in secrets"))
            if name in self.secrets[:index]:
                problems.append((("secrets", index), f"{name} is listed twice"))
        if problems:
            raise LocatedError(*problems)
        return self

    def _precision_problem(self) -> tuple[grammar.Path, str] | None:
        """Return the impossible setting of fp8 in this job, which ranks would refuse later."""
        fp8, precision = self.runtime.get("fp8"), self.runtime.get("mixed_precision") or "no"
        if precision != "fp8":
            said = "has no effect without `mixed_precision: fp8`"
            return (("runtime", "fp8"), said) if fp8 else None
        try:
            fp8_settings.check_with(
                fp8 or {}, cpu=bool(self.runtime.get("use_cpu")), deepspeed=self.runtime.get("deepspeed") is not None
            )
        except ValueError as error:
            return ("runtime", "mixed_precision"), str(error)
        return None

    def _layout_problem(self) -> tuple[grammar.Path, str] | None:
        """Return the impossible setting of ``runtime.parallelism`` in this job, which ranks would refuse later."""
        settings, resources = self.runtime.get("parallelism"), self.resources
        elsewhere = resources.options and not (resources.procs_per_node or resources.gpus_per_node)
        if not settings or elsewhere:  # options of a platform say how many processes there are
            return None
        if resources.min_nodes != resources.max_nodes:
            return ("resources", "nodes"), "runtime.parallelism lays out a fixed number of processes: give one number"
        found = parallelism_settings.problem(settings, resources.max_nodes * resources.nproc)
        return (("runtime", "parallelism"), found) if found else None

    def _megatron_problem(self) -> tuple[grammar.Path, str] | None:
        """Return the setting of this job that contradicts Megatron-LM, which ranks would refuse later."""
        runtime, resources = self.runtime, self.resources
        if runtime.get("megatron") is None:
            return None
        fixed = isinstance(resources.nodes, int) and bool(resources.procs_per_node or resources.gpus_per_node)
        try:
            megatron_keys.check_with(
                runtime["megatron"],
                precision=runtime.get("mixed_precision") or "no",
                accumulation=runtime.get("gradient_accumulation_steps") or 1,
                others=[name for name in ("fsdp", "deepspeed", "parallelism") if runtime.get(name) is not None],
                processes=resources.min_nodes * resources.nproc if fixed else None,
            )
        except ValueError as error:
            return ("runtime", "megatron"), str(error)
        return None

    def _starts(self, program: str) -> bool:
        """Return True when the first word of the command is *program*, by whatever path."""
        words = self.command.split() if isinstance(self.command, str) else self.command or ("",)
        return posixpath.basename(words[0]) == program
