"""The runtime's configuration: one table of keys, read by training processes and by the launch layer. Torch-free.

A value comes from the first of: an argument in the script, ``ORC_<KEY>`` in the environment, the documented
``ACCELERATE_<KEY>`` (fall-back) or its older spelling, the default. It is resolved once, with its provenance, and never
written back to the environment. The launch layer uses the same table the other way round: `to_env` turns the
``runtime:`` section of a job file into the ``ORC_*`` variables that `resolve` reads on the nodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from orc.runtime.core.parsing import choice, nearest, number, whole
from orc.runtime.core.parsing import parse_bool as parse_bool


class ConfigError(ValueError):
    """A configuration value that cannot be used; the message names the key, the value and the source."""


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return parse_bool(value)
    raise ValueError("expected true or false")


_number = partial(number, endless=True)


def _word(value: Any) -> str:
    text = "no" if value is False else str(value).strip().lower()  # YAML 1.1 reads a bare `no` as false
    if not text:
        raise ValueError("expected a word")
    return text


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value


# Precisions, and the 16-bit type of what each does not compute otherwise. A new one is a line here and a module of
# `orc.runtime.parallel.precision`.
PRECISIONS: dict[str, str | None] = {"no": None, "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


STAND_INS = ("accelerate",)  # packages that `orc.runtime.stand_ins` has a table of names for


def _packages(value: Any) -> str:
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(f"expected a list of packages: {', '.join(STAND_INS)}")
    names = [str(name).strip() for name in given]
    for name in names:
        if name not in STAND_INS:
            raise ValueError(f"there is no stand-in for {name!r}{nearest(name, STAND_INS)} ({', '.join(STAND_INS)})")
    return ",".join(dict.fromkeys(names))


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class Key(NamedTuple):
    """Configuration key: its name, the parser of its value, its default and its description."""

    name: str
    parse: Callable[[Any], Any]
    default: Any
    doc: str
    accelerate: bool = False  # Accelerate documents the variable ACCELERATE_<KEY> for it
    older: tuple[str, ...] = ()  # older spellings of that, which documents still show

    @property
    def variable(self) -> str:
        """The environment variable that carries it."""
        return f"ORC_{self.name.upper()}"

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that can carry it; the first that is set counts."""
        return self.variable, *([f"ACCELERATE_{self.name.upper()}"] if self.accelerate else []), *self.older


# fmt: off
KEYS: dict[str, Key] = {key.name: key for key in (
    Key("mixed_precision", choice(*PRECISIONS), "no", "Precision of forward and backward.", True, ("MIXED_PRECISION",)),
    Key("downcast_bf16", _boolean, False,
        "On a TPU with bf16: keep float as bfloat16 and double as float32, instead of both as bfloat16."),
    Key("gradient_accumulation_steps", whole(1), 1, "Batches per optimizer step.", True),
    Key("strategy", choice("auto", "ddp", "none"), "auto",
        "How the model is replicated: auto means ddp when there is more than one process."),
    Key("use_cpu", _boolean, False, "Train on the CPU even where an accelerator is present.", True),
    Key("debug_mode", _boolean, False, "Check shapes and structure before every collective.", True),
    Key("seed", whole(0), None, "Seed of Python, NumPy and torch, set when the Accelerator is made."),
    Key("timeout_s", _number(1), None,
        "Time-out of collectives in seconds; unset: torch's, 600 of NCCL and 1800 of gloo."),
    Key("log_level", choice(*LOG_LEVELS), None,
        "Level of loggers from get_logger: DEBUG, INFO, WARNING, ERROR or CRITICAL.", True),
    Key("dynamo_backend", _word, "no", "Back end of torch.compile for prepared models; `no` leaves them as they are.",
        True),
    Key("dynamo_mode", _word, None, "Mode of torch.compile.", True),
    Key("dynamo_use_fullgraph", _boolean, None, "torch.compile raises instead of breaking the graph.", True),
    Key("dynamo_use_dynamic", _boolean, None, "torch.compile expects varying shapes.", True),
    Key("stall_timeout_s", _number(0), None,
        "End the run after so many seconds without a step or batch on a rank; 0 is never. Unset: inside a job a stall "
        "is reported after 1800 s, or nine tenths of the collectives' time-out."),
    Key("stall_factor", _number(1), None,
        "Report ranks that are behind the others for this many times the median step."),
    Key("stall_action", choice("exit", "warn"), None,
        "What follows the report of a stall: exit (status 79) or nothing; exit when stall_timeout_s is set."),
    Key("spike_action", choice("off", "warn", "raise", "skip"), "off",
        "What to do about a loss or gradient norm that is NaN, infinite or far above the usual."),
    Key("spike_factor", _number(1), 10.0, "How many times the usual value counts as a spike."),
    Key("spike_every", whole(1), 10, "Optimizer steps between two looks at loss and gradient norm."),
    Key("stand_in", _packages, None,
        "Packages that the runtime stands in for: with accelerate, programs that import it run on orc.runtime."),
    Key("metrics", _boolean, None, "Write metrics.jsonl; when unset, inside a job only."),
    Key("metrics_interval_s", _number(0.05), 10.0, "Seconds between two lines of metrics.jsonl."),
    Key("peak_tflops", _number(0.001), None, "Peak TFLOP/s of one device, for MFU; known for common GPUs."),
    Key("notices", choice("auto", "off"), "auto",
        "Ask the platform (EC2, Google Cloud, Slurm) for preemption notices where it is detected."),
    Key("notice_file", _text, None, "A file whose appearance is a preemption notice."),
    Key("checkpoint_dir", _text, None, "Where save_state writes when it is given no directory."),
    Key("checkpoint_every", whole(1), None, "Save automatically every so many optimizer steps."),
    Key("checkpoint_keep", whole(1), None, "How many committed checkpoints to keep; all when unset."),
    Key("checkpoint_shared", choice("auto", "1", "0"), "auto",
        "Whether the machines of a run share checkpoint directories: 1 all, 0 none, auto looks."),
    Key("resume", choice("auto", "never"), "auto", "Whether Accelerator.resume() loads the newest checkpoint."),
)}
# fmt: on


class Section(NamedTuple):
    """Settings of one feature: a mapping in the job file, variables of their own on the nodes.

    Its table is a module of this folder, which is imported when the feature is used. Those of a *precision* are refused
    with any other.
    """

    name: str
    module: str
    doc: str
    precision: str | None = None

    def parse(self, values: Any) -> dict[str, Any]:
        """Return the checked settings of a mapping, by key. Raises `ValueError`."""
        return self._table().normalise(values)  # type: ignore[no-any-return]

    def variables(self, values: Any) -> dict[str, str]:
        """Return the variables that bring *values* to the nodes. Raises `ValueError`."""
        return self._table().variables(values)  # type: ignore[no-any-return]

    def _table(self) -> Any:
        return importlib.import_module(f"orc.runtime.core.{self.module}")


# fmt: off
SECTIONS: dict[str, Section] = {section.name: section for section in (
    Section("fsdp", "fsdp_settings",
            "Shard parameters, gradients and optimizer state: a mapping with the documented fsdp_ keys."),
    Section("parallelism", "parallelism_settings",
            "Spread the run over several dimensions: a mapping with dp_replicate_size, dp_shard_size, tp_size, ..."),
    Section("deepspeed", "deepspeed_keys",
            "Train with DeepSpeed: a mapping with the documented keys of deepspeed_config."),
    Section("megatron", "megatron_keys",
            "Train with Megatron-LM: a mapping with the documented keys of megatron_lm_config."),
    Section("fp8", "fp8_settings",
            "Options of mixed_precision: fp8: a mapping with the documented keys of fp8_config.", precision="fp8"),
)}
# fmt: on

# Keys of the job file's `runtime:` section, each with its description. The checkpoint keys have a section of their own.
JOB_DOCS = {name: key.doc for name, key in KEYS.items() if not name.startswith("checkpoint_") and name != "resume"} | {
    name: section.doc for name, section in SECTIONS.items()
}
JOB_KEYS = tuple(JOB_DOCS)


class Value(NamedTuple):
    """A resolved value and where it came from: ``argument``, ``ORC_X``, ``ACCELERATE_X`` or ``default``."""

    value: Any
    source: str


class RuntimeConfig:
    """Every key of `KEYS`, resolved. ``config.mixed_precision`` is the value, ``config.source("seed")`` its origin.

    *values* are those by key, each with its origin.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name].value
        except KeyError:
            raise AttributeError(f"no configuration key {name!r}") from None

    def source(self, name: str) -> str:
        """Return the origin of the value of *name*; see `Value`."""
        return self.values[name].source


def check(name: str, value: Any) -> Any:
    """Return *value* in the type of key *name*. Raises `ConfigError`: unknown key (with the nearest), bad value."""
    key = KEYS.get(name) or SECTIONS.get(name)
    if key is None:
        raise ConfigError(f"unknown key {name!r}{nearest(name, [*KEYS, *SECTIONS])}")
    try:
        return key.parse(value)
    except ValueError as error:
        what = name if name in SECTIONS else f"{name} = {value!r}"  # a section's error has the key in it
        raise ConfigError(f"{what}: {error}") from None


def to_env(values: Mapping[str, Any]) -> dict[str, str]:
    """The variables that carry *values*: ``ORC_*`` and those of sections; ``None`` is unset. Raises `ConfigError`."""
    env: dict[str, str] = {}
    chosen = str(values.get("mixed_precision") or "no").lower()
    for section in SECTIONS.values():
        if section.precision is not None and values.get(section.name) and chosen != section.precision:
            raise ConfigError(
                f"{section.name} has no effect with mixed_precision: {chosen}; set mixed_precision: "
                f"{section.precision}, or leave the section out"
            )
    for name, value in values.items():
        if value is None:
            continue
        parsed = check(name, value)
        if name in SECTIONS:
            env.update(SECTIONS[name].variables(parsed))
        else:
            env[KEYS[name].variable] = str(parsed).lower() if isinstance(parsed, bool) else str(parsed)
    return env


def resolve(arguments: Mapping[str, Any], env: Mapping[str, str]) -> RuntimeConfig:
    """The configuration for *arguments* (``None`` means not given) in the environment *env*. Raises `ConfigError`."""
    for name in arguments:
        if name not in KEYS:
            check(name, None)
    values: dict[str, Value] = {}
    for name, key in KEYS.items():
        if arguments.get(name) is not None:
            values[name] = Value(check(name, arguments[name]), "argument")
            continue
        for variable in key.variables:
            if variable in env:
                try:
                    values[name] = Value(key.parse(env[variable]), variable)
                except ValueError as error:
                    raise ConfigError(f"{variable}={env[variable]!r}: {error}") from None
                break
        else:
            values[name] = Value(key.default, "default")
    return RuntimeConfig(values)
