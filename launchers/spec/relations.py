"""Relations of a job to others: those it waits for, and the artefacts that it takes and leaves."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator

from orc.launchers.spec import grammar

Condition = Literal["success", "any", "failure"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
CHECKPOINTS = "checkpoint.dir"  # as an output: the job's checkpoint directory, wherever that is
_ARTEFACT = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
_JOB = re.compile(r"@last|[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)


class Requirement(NamedTuple):
    """Job that another one waits for, as people name it, and the end of it that is waited for."""

    job: str
    condition: Condition = "success"

    def __str__(self) -> str:
        return f"{self.job}:{self.condition}"


class Artefact(NamedTuple):
    """Output of a job."""

    job: str
    output: str


def requirement(text: str) -> Requirement:
    """Return the requirement in ``JOB[:CONDITION]``. Raises `ValueError`."""
    job, colon, condition = text.strip().partition(":")
    if not _JOB.fullmatch(job):
        raise ValueError(f"{text!r} names no job; write a job id, and perhaps :success, :any or :failure")
    if colon and condition not in CONDITIONS:
        from orc.launchers.spec.problems import choose

        raise ValueError(f"{text!r}: unknown condition {condition!r}{choose(condition, CONDITIONS)}")
    return Requirement(job, condition or "success")  # type: ignore[arg-type]


def artefact(text: str) -> Artefact:
    """Return the artefact in ``JOB.OUTPUT``. Raises `ValueError`."""
    job, _, output = text.partition(".")
    if not _JOB.fullmatch(job) or not _ARTEFACT.fullmatch(output):
        raise ValueError(f"{text!r} is no output of a job; write JOB.OUTPUT, for example train.model")
    return Artefact(job, output)


def variable(kind: Literal["INPUT", "OUTPUT"], name: str) -> str:
    """Return the environment variable that has the path of an input or output: ``ORC_INPUT_MODEL``."""
    return f"ORC_{kind}_{name.upper().replace('-', '_')}"


def _depends_on(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        value = [f"{job}:{condition}" for job, condition in value.items()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a job id, a list of them, or a mapping of job ids to conditions")
    found = [requirement(text) for text in grammar.texts(value)]
    if twice := [one.job for index, one in enumerate(found) if one.job in {other.job for other in found[:index]}]:
        raise ValueError(f"{twice[0]} is named twice")
    return tuple(map(str, found))


def _named(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping of names")
    found: dict[str, str] = {}
    for name, text in value.items():
        if not isinstance(name, str) or not _ARTEFACT.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an artefact: letters, digits, - and _, a letter first")
        if (clash := variable("INPUT", name)) in {variable("INPUT", other) for other in found}:
            raise ValueError(f"two names would become {clash}")
        found[name] = grammar.line(text)
    return found


def _inputs(value: Any) -> dict[str, str]:
    found = _named(value)
    for text in found.values():
        artefact(text)
    return found


def _outputs(value: Any) -> dict[str, str]:
    found = {}
    for name, text in _named(value).items():
        if posixpath.isabs(text) or text.startswith("~"):
            raise ValueError(f"{text!r} must be relative to the working directory of the job")
        normal = posixpath.normpath(text) if text else ""
        if normal in ("", ".", "..") or normal.startswith("../"):
            raise ValueError(f"{text!r} must lie below the working directory of the job")
        found[name] = normal
    return found


DependsOn = Annotated[
    tuple[str, ...], BeforeValidator(_depends_on, json_schema_input_type=str | list[str] | dict[str, Condition])
]
Inputs = Annotated[dict[str, str], BeforeValidator(_inputs)]
Outputs = Annotated[dict[str, str], BeforeValidator(_outputs)]
