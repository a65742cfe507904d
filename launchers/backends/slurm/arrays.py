"""Attempts as the elements of one Slurm array. Pure.

An array has one script, one name and one set of options, and attempts have their own. So the array is a directory
``<root>/arrays/<name>`` with a link to the attempt directory of each element, and its script runs the script of the
element that Slurm starts. Which element it is in which array, an attempt's directory tells in ``array.json``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from orc.launchers.agent.records import parse_object
from orc.launchers.errors import BackendError

if TYPE_CHECKING:
    from orc.launchers.paths import Layout
    from orc.launchers.plan import Plan

RECORD_NAME = "array.json"
SCRIPT_NAME = "array.sbatch"
# Options of sbatch that every attempt has for itself.
_NAME = re.compile(r"orc-array-[0-9a-f]{1,64}")
_MOST_ARRAYS = 100  # that one attempt was submitted in
_OWN = ("job-name", "comment", "chdir", "output")


@dataclass(frozen=True)
class ArrayElement:
    """Index of an attempt in an array."""

    array: str  # its name in Slurm
    index: int


def array_name(markers: Iterable[str]) -> str:
    """Return the name of an array: the same for the same attempts, on every submission."""
    digest = hashlib.sha256("\n".join(markers).encode()).hexdigest()
    return f"orc-array-{digest[:16]}"


def array_dir(layout: Layout, name: str) -> PurePosixPath:
    """Return the array's directory; may begin with ``~``."""
    return layout.root / "arrays" / name


def elements_of(record: bytes) -> list[ArrayElement]:
    """Return the elements in an ``array.json``, oldest first."""
    try:
        elements = [
            ArrayElement(str(one["array"]), int(one["index"])) for one in (parse_object(record) or {})["elements"]
        ]
    except (ValueError, KeyError, TypeError):  # a crashed machine has lost its content, or somebody else has written it
        return []
    return [element for element in elements[-_MOST_ARRAYS:] if _NAME.fullmatch(element.array)]


def record_of(elements: Sequence[ArrayElement]) -> bytes:
    """Return the ``array.json`` of *elements*; the inverse of `elements_of`."""
    return json.dumps({"elements": [{"array": one.array, "index": one.index} for one in elements]}).encode() + b"\n"


def check_alike(plans: Sequence[Plan]) -> None:
    """Check that one array can hold *plans*. Raises `BackendError`."""
    first = directives(script_of(plans[0]))
    if "hetjob" in first:
        hint = "Submit them one by one, or without `heterogeneous`."
        raise BackendError("Slurm makes no arrays of heterogeneous jobs", where=plans[0].marker, hint=hint)
    for plan in plans[1:]:
        other = directives(script_of(plan))
        for one, two in zip([*first, "nothing"], [*other, "nothing"], strict=False):
            if one != two:
                raise BackendError(
                    f"the elements of an array ask Slurm for the same, and {plan.marker} asks for {two}, "
                    f"not for {one} like {plans[0].marker}",
                    where=plan.marker,
                    hint="Submit it by itself.",
                )


def script_of(plan: Plan) -> str:
    """Return the batch script of one attempt."""
    return next(file.content for file in plan.files if file.path.endswith(".sbatch"))


def directives(script: str) -> list[str]:
    """Return the first line of a script and its options, without those that name the job."""
    lines = script.splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    own = re.compile(rf"--(?:{'|'.join(_OWN)})(?:=.*)?")
    return [lines[0], *(option for option in options if not own.fullmatch(option))]


def array_script(plan: Plan, directory: str) -> str:
    """Return the script of the array in *directory* (absolute), with the options of *plan*."""
    from orc.templates.render import render

    shebang, *options = directives(script_of(plan))
    return render("slurm/array.sbatch.j2", shebang=shebang, directives=options, directory=directory)


def array_options(name: str, count: int, at_once: int | None, directory: str) -> list[str]:
    """Return the options of sbatch for the array itself."""
    limit = f"%{at_once}" if at_once is not None else ""
    return [
        f"--array=0-{count - 1}{limit}",
        f"--job-name={name}",
        f"--comment={name}",
        f"--chdir={directory}",
        f"--output={directory.replace('%', '%%')}/%a/logs/launcher.log",
    ]
