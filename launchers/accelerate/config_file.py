"""Configuration files of Accelerate: their place, their keys with source positions, and their checked values.

A file is YAML or JSON. Its keys are those of `orc.launchers.accelerate.keys`; what is unknown or has a wrong type is an
error with its place and the nearest key. YAML is read by the rules of version 1.2, so a bare ``no`` is the text "no".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orc.launchers.accelerate.keys import CONFIG_KEYS, OPTIONS, SECTIONS, Option
from orc.launchers.accelerate.location import default_path
from orc.launchers.errors import SpecError
from orc.launchers.spec import source
from orc.launchers.spec.problems import Problem, SpecProblems, at, dotted, nearest, shown
from orc.launchers.spec.source import Document, KeyPath

CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
# Texts as they are written: 1.10 is a version and no number.
_TEXTUAL = {
    *("pytorch_version", "transformers_version", "py_version", "base_job_name", "profile", "iam_role_name"),
    *("commands", "tpu_env", "tpu_name", "main_process_ip", "gpu_ids"),
}
# What keys of a section begin with, which some files leave out.
_PREFIXES: Mapping[Any, str] = {
    **{f"{name}_config": f"{name}_" for name in ("fsdp", "megatron_lm", "fp8", "dynamo")},
    "parallelism_config": "parallelism_config_",
}
# Keys that documents of other ages have -> what became of them.
RENAMED = {
    "fp16": "mixed_precision: fp16",
    "use_mps_device": "use_cpu: false, which trains on Apple's GPU where there is one",
}


@dataclass(frozen=True)
class Given:
    """Value of a file: its option, its checked value, and the place and spelling it was given at."""

    option: Option
    value: Any
    path: KeyPath
    where: str


@dataclass(frozen=True)
class AccelerateConfig:
    """Configuration file that was read: its values by the option's name, and notes about spellings of other ages.

    A key without a value (``main_process_ip: null``) is as good as absent.
    """

    path: Path
    document: Document
    given: Mapping[str, Given]
    notes: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the option *name*, or *default* where the file has none. Raises `KeyError`."""
        found = self.given.get(OPTIONS[name].name)
        return default if found is None else found.value

    def where(self, name: str) -> str:
        """Return the place of the option *name*: file, line and column."""
        found = self.given.get(name)
        return str(self.path) if found is None else found.where

    @property
    def values(self) -> dict[str, Any]:
        """The values by the option's name."""
        return {name: one.value for name, one in self.given.items()}

    @property
    def sagemaker(self) -> bool:
        """True for a job of Amazon SageMaker."""
        return bool(self.get("compute_environment") == "AMAZON_SAGEMAKER")

    @property
    def tpu(self) -> bool:
        """True for a run on a TPU."""
        return self.get("distributed_type") in ("TPU", "XLA") or bool(self.get("tpu_cluster"))


def find_default(env: Mapping[str, str]) -> Path | None:
    """Return the default file where there is one. Raises `SpecError` when others than the user can write to it."""
    path = default_path(env)
    if not path.is_file():
        return None
    from orc.launchers.paths import refuse_untrusted

    refuse_untrusted(path, "configuration file", SpecError)
    return path


def read_config(path: str | Path) -> AccelerateConfig:
    """Return the configuration in the YAML or JSON file *path*.

    Raises:
        SpecError: it cannot be read, or is no mapping; `SpecProblems` with all unknown keys and wrong values, each with
            file, line and column.
    """
    file = Path(path).expanduser()
    text = source.read_file(file, "configuration file")
    document = source.parse(text, str(file), lambda path: "text" if path and path[0] in _TEXTUAL else "typed")
    return config_of(document, file)


def config_of(document: Document, path: Path) -> AccelerateConfig:
    """Return the configuration in *document*, which was read from *path*. Raises `SpecProblems`."""
    given: dict[str, Given] = {}
    notes: list[str] = []
    problems: list[Problem] = []
    for place, value in _leaves(document.data):
        if problem := _structure(document, place, value):
            problems.append(problem)
            continue
        if _says_nothing(place, value):
            continue
        name, option, note = _option(place, value)
        if note:
            notes.append(f"{document.origin(place, key=True).where}: {dotted(place)}: {note}")
        if option is None:
            if not note:
                problems.append(_unknown(document, place))
            continue
        try:
            parsed = _parsed(option, name, value)
        except (ValueError, TypeError) as error:
            problems.append(at(document, place, _refused(str(error), value)))
            continue
        one = Given(option, parsed, place, document.origin(place).where)
        first = given.setdefault(option.name, one)
        if first is not one and first.value != parsed:
            problems.append(at(document, place, f"is also given as {dotted(first.path)}, with another value", key=True))
    problems += _contradictions(document, given)
    if problems:
        raise SpecProblems(problems)
    return AccelerateConfig(path, document, given, tuple(notes))


def _leaves(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every key and its value; those of sections with the section in front."""
    for key, value in data.items():
        if key in SECTIONS and isinstance(value, dict) and value:
            yield from (((key, inner), item) for inner, item in value.items())
        else:
            yield (key,), value


def _says_nothing(place: KeyPath, value: Any) -> bool:
    """Return True for a value that is as good as none: null, an empty text or section, and DeepSpeed's auto."""
    auto = value == "auto" and place == ("deepspeed_config", "gradient_accumulation_steps")
    return value is None or value == "" or auto or (place[0] in SECTIONS and value == {})


def _structure(document: Document, place: KeyPath, value: Any) -> Problem | None:
    """Return the problem of a section that is no mapping, and of credentials in a file."""
    if place[-1] in CREDENTIALS:
        what = "credentials do not belong into files; use an AWS profile or the environment"
        return at(document, place, what, key=True)
    if len(place) == 1 and place[0] in SECTIONS and value not in (None, "", {}):
        return at(document, place, f"expected a mapping of keys and values, not {shown(value)}")
    return None


def _option(place: KeyPath, value: Any) -> tuple[str, Option | None, str]:
    """Return the documented path, its option, and a note where the spelling is of another age."""
    name = dotted(place)
    if option := CONFIG_KEYS.get(name):
        note = "" if name == option.key or name == "gradient_accumulation_steps" else _newer(place, option)
        return name, option, note
    if len(place) == 2 and (option := CONFIG_KEYS.get(f"{place[0]}.{_PREFIXES.get(place[0])}{place[1]}")):
        return name, option, f"is read as {str(option.key).partition('.')[2]}"  # fsdp_config without fsdp_
    if name == "fp16" and isinstance(value, bool):
        chosen = CONFIG_KEYS["mixed_precision"] if value else None
        return name, chosen, f"is read as {RENAMED['fp16'] if value else 'mixed_precision: no'}"
    if name in RENAMED:
        return name, None, f"is no key any more: {RENAMED[name]}"
    return name, None, ""


def _newer(place: KeyPath, option: Option) -> str:
    """Return the note about a second spelling; those that are documented side by side need none."""
    current = str(option.key)
    if len(place) == 2 and current.startswith(f"{place[0]}."):
        return ""
    return f"is read as {current}, its place today"


def _parsed(option: Option, name: str, value: Any) -> Any:
    """Return the checked value. Raises `ValueError`."""
    if name == "fp16":
        return "fp16"
    if option.name in ("tpu_env", "env") and isinstance(value, Mapping):
        return [f"{key}={item}" for key, item in value.items()]
    if option.parse is dict and not isinstance(value, Mapping):
        raise ValueError("expected a mapping")
    return option.parse(value)


def _unknown(document: Document, place: KeyPath) -> Problem:
    """Return the problem of an unknown key, with the nearest one of its section or the section it belongs to."""
    word = str(place[-1])
    inside = f"{place[0]}." if len(place) == 2 else ""
    here = [path.removeprefix(inside) for path in CONFIG_KEYS if path.startswith(inside)]
    here = [path for path in here if "." not in path] + (list(SECTIONS) if not inside else [])
    elsewhere = [path for path in CONFIG_KEYS if path.rpartition(".")[2] == word]
    if elsewhere:
        hint = f", did you mean {elsewhere[0]}?"
    else:
        hint = nearest(word, here) or nearest(word, [path.rpartition(".")[2] for path in CONFIG_KEYS])
    return at(document, place, f"unknown key {word!r}{hint}", key=True, shown=place[:-1])


def _contradictions(document: Document, given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield the contradictions between values."""
    kind, place = given.get("distributed_type"), given.get("compute_environment")
    sagemaker = place is not None and place.value == "AMAZON_SAGEMAKER"
    if kind is not None and kind.value in ("DATA_PARALLEL", "MODEL_PARALLEL") and not sagemaker:
        what = f"{kind.value} is of Amazon SageMaker, and compute_environment is LOCAL_MACHINE"
        yield at(document, kind.path, what)
    rank, machines, processes = (given.get(name) for name in ("machine_rank", "num_machines", "num_processes"))
    if rank is not None and rank.value >= (count := machines.value if machines else 1):
        yield at(document, rank.path, f"{rank.value} is no machine of {count}: they are numbered from 0")
    if machines and processes and not sagemaker and processes.value % machines.value:
        what = f"{processes.value} processes cannot be divided among {machines.value} machines"
        yield at(document, processes.path, what)


def _refused(why: str, value: Any) -> str:
    """Return *why* with what was given in it."""
    if repr(value) in why:
        return why
    expected, comma, near = why.partition(", did you mean")
    return f"{expected}, not {shown(value)}{comma}{near}"
