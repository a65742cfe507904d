"""Groups of jobs in one file: the members of a sweep or of an array, and the stages of a pipeline.

Each member is a job file of its own that is made from the one that was read, before references are replaced: so
``${job.args.lr}`` is the member's value. What is wrong is reported at the line of the one file.
"""

from __future__ import annotations

import copy
import graphlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from orc.launchers.spec import relations
from orc.launchers.spec.load import Examined, LoadedJob, examine_document, put_value, read_job_file, reading, validate
from orc.launchers.spec.problems import Problem, SpecProblems, at, choose, nearest
from orc.launchers.spec.source import Document, KeyPath
from orc.launchers.spec.sweep import array_indices

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.spec import JobSpec

GroupKind = Literal["sweep", "array", "pipeline"]
OF_GROUP = ("sweep", "array", "max_parallel")
_OF_PIPELINE = ("jobs", "name", "max_parallel")
_REFERENCE = re.compile(r"[-_. ]?\$\{[^}]*\}")
STAGE = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"


class Member(NamedTuple):
    """Member of a group: its job, and the values in which it differs from the others."""

    loaded: LoadedJob
    number: int  # the index in a sweep or array; the place of a stage in its pipeline
    parameters: Mapping[str, str] = {}
    stage: str = ""


@dataclass(frozen=True)
class LoadedGroup:
    """Group of jobs, as one file describes it. Members of sweeps and arrays run from one snapshot."""

    kind: GroupKind
    name: str
    members: tuple[Member, ...]
    max_parallel: int | None
    source_path: Path

    @property
    def specs(self) -> list[JobSpec]:
        """The jobs of all members, in order."""
        return [member.loaded.spec for member in self.members]

    def after(self, jobs: Sequence[str]) -> LoadedGroup:
        """Return the group with members that wait for *jobs*, too. Raises `SpecError`."""
        members = [member._replace(loaded=member.loaded.after(jobs)) for member in self.members]
        return replace(self, members=tuple(members))


@dataclass
class ExaminedGroup:
    """A file with a group, examined: its members, each examined, and what is wrong with the group itself."""

    kind: GroupKind
    name: str
    source_path: Path
    max_parallel: int | None = None
    members: list[tuple[Examined, int, Mapping[str, str], str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def loaded(self) -> LoadedGroup:
        """Return the group. Raises `SpecProblems` with everything that is wrong with it and its members."""
        problems = [*self.problems, *(problem for member in self.members for problem in member[0].problems)]
        if problems:
            raise SpecProblems(dict.fromkeys(problems))  # what all members have in common is said once
        members = tuple(
            Member(found.loaded, index, parameters, stage)
            for found, index, parameters, stage in self.members
            if found.loaded is not None
        )
        return LoadedGroup(self.kind, self.name, members, self.max_parallel, self.source_path)


def load_jobs(
    path: str | os.PathLike[str], given: Sequence[str] = (), *, cluster: str | None = None
) -> LoadedJob | LoadedGroup:
    """Return the job or the group of jobs in the file *path*; arguments as of `load_job`. Raises `SpecError`."""
    found = examine_jobs(path, given, cluster=cluster)
    return found.loaded() if isinstance(found, ExaminedGroup) else found.job()


def examine_jobs(
    path: str | os.PathLike[str], given: Sequence[str] = (), *, cluster: str | None = None
) -> Examined | ExaminedGroup:
    """Return the job or the group in the file *path* with all that is wrong with it; arguments as of `load_job`."""
    document, source_path = read_job_file(path, given, cluster)
    if "jobs" in document.data:
        return _pipeline(document, source_path, cluster)
    if document.data.get("sweep") is None and document.data.get("array") is None:
        return examine_document(document, source_path)
    return _sweep(document, source_path)


# -- sweeps and arrays


def _sweep(document: Document, source_path: Path) -> Examined | ExaminedGroup:
    own_keys = {key: document.data[key] for key in OF_GROUP if key in document.data}
    try:  # the group alone: the keys that it gives values to need not be there without it
        spec = validate(Document({"name": "x", "command": "x", **own_keys}, "", document.keys, document.values))
    except SpecProblems:
        return examine_document(_copy(document), source_path)
    name = _REFERENCE.sub("", str(document.data.get("name", "")))
    found = ExaminedGroup("array" if spec.sweep is None else "sweep", name, source_path, spec.max_parallel)
    if spec.sweep is not None:
        several: list[tuple[int, dict[str, Any]]] = list(enumerate(spec.sweep.assignments()))
    else:
        several = [(index, {}) for index in array_indices(spec.array or "")]
    shared = _task_variables([index for index, _ in several])
    for index, assigned in several:
        own = _copy(document)
        for key in OF_GROUP:
            own.data.pop(key, None)
        parameters = {key: _shown(value) for key, value in assigned.items()}
        for key, value in assigned.items():
            path: KeyPath = tuple(key.split("."))
            put_value(own, path, _as_read(value, path), document.origin(("sweep",)).where)
        _put_all(own, "env", {"ORC_ARRAY_TASK_ID": str(index), **shared})
        tags = own.data.get("tags") or {}
        _put_all(own, "tags", {key: text for key, text in parameters.items() if key not in tags and text})
        examined = examine_document(own, source_path)
        found.members.append((examined, index, parameters, ""))
        if examined.problems:  # the others have the same ones, or theirs can wait
            break
    return found


def _task_variables(indices: Sequence[int]) -> dict[str, str]:
    """Return variables of all members, named as Slurm names them; the group's id is added when it has one."""
    return {
        "ORC_ARRAY_TASK_COUNT": str(len(indices)),
        "ORC_ARRAY_TASK_MIN": str(min(indices)),
        "ORC_ARRAY_TASK_MAX": str(max(indices)),
    }


def _put_all(document: Document, section: str, values: Mapping[str, str]) -> None:
    if values:
        document.data[section] = {**(document.data.get(section) or {}), **values}


def _as_read(value: Any, path: KeyPath) -> Any:
    """Return *value* as it would have been read at *path*: words of a command line are texts."""
    if reading(path) != "typed" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _shown(value)
    return value


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return ",".join(map(_shown, value))
    return str(value)


# -- pipelines


def _pipeline(document: Document, source_path: Path, cluster: str | None) -> ExaminedGroup:
    data = document.data
    name = data.get("name")
    found = ExaminedGroup("pipeline", name if isinstance(name, str) else "pipeline", source_path)
    stages = data["jobs"]
    if not isinstance(stages, dict) or not stages:
        found.problems.append(at(document, ("jobs",), "expected a mapping of names to jobs"))
        return found
    for key in ("sweep", "array"):
        if key in data:
            what = "a job of a pipeline is one job: submit sweeps and arrays by themselves"
            found.problems.append(at(document, (key,), what, key=True))
    limit = data.get("max_parallel")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        found.problems.append(at(document, ("max_parallel",), "expected a whole number from 1"))
    found.max_parallel = limit if isinstance(limit, int) else None
    for index, (stage, own) in enumerate(stages.items()):
        place: KeyPath = ("jobs", stage)
        if not re.fullmatch(STAGE, stage, re.ASCII):
            what = f"{stage!r} is no name of a job: letters, digits, - and _, no dash first"
            found.problems.append(at(document, place, what, key=True, shown=("jobs",)))
        elif not isinstance(own, dict):
            found.problems.append(at(document, place, "expected the keys of a job"))
        elif refused := next((key for key in OF_GROUP if key in own), None):
            what = "a job of a pipeline is one job: submit sweeps and arrays by themselves"
            found.problems.append(at(document, (*place, refused), what, key=True))
        else:
            examined = examine_document(_stage(document, stage, found.name, cluster), source_path)
            found.members.append((examined, index, {}, stage))
    found.problems += _wrong_relations(document, found)
    return found


def _stage(document: Document, stage: str, pipeline: str, cluster: str | None) -> Document:
    """Return the job file of one stage: the keys of the pipeline, and over them those of the stage."""
    shared = {key: value for key, value in document.data.items() if key not in (*_OF_PIPELINE, *OF_GROUP)}
    data = _merged(copy.deepcopy(shared), copy.deepcopy(document.data["jobs"][stage]))
    data.setdefault("name", f"{pipeline}-{stage}")
    if cluster is not None:
        data["cluster"] = cluster
    prefix: KeyPath = ("jobs", stage)

    def moved(table: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
        kept = {path: origin for path, origin in table.items() if path and path[0] in shared}
        return kept | {path[2:]: origin for path, origin in table.items() if path[:2] == prefix}

    return Document(data, document.where, moved(document.keys), moved(document.values))


def _merged(below: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return *below* with the values of *over*; mappings are merged key by key."""
    for key, value in over.items():
        inner = below.get(key)
        below[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return below


def _wrong_relations(document: Document, found: ExaminedGroup) -> Iterator[Problem]:
    """Yield what is wrong with the names by which the stages of a pipeline refer to each other."""
    specs = {stage: examined.loaded.spec for examined, _, _, stage in found.members if examined.loaded is not None}
    known = list(document.data["jobs"])
    for stage, spec in specs.items():
        for text in spec.depends_on:
            job = relations.requirement(text).job
            if job not in known and (near := nearest(job, known)):
                yield at(document, ("jobs", stage, "depends_on"), f"no job {job!r} in this pipeline{near}")
        for name, text in spec.inputs.items():
            job, output = relations.artefact(text)
            place = ("jobs", stage, "inputs", name)
            if job not in known:
                if near := nearest(job, known):
                    yield at(document, place, f"no job {job!r} in this pipeline{near}")
            elif job in specs and output not in specs[job].outputs:
                outputs = list(specs[job].outputs)
                hint = choose(output, outputs) if outputs else ": it has none"
                yield at(document, place, f"{job} has no output {output!r}{hint}")
    if circle := cycle({stage: stages_before(spec, known) for stage, spec in specs.items()}):
        what = "depends on itself" if len(circle) == 1 else f"wait for each other: {' -> '.join([*circle, circle[0]])}"
        yield at(document, ("jobs", circle[0]), what)


def stages_before(spec: JobSpec, stages: Iterable[str]) -> list[str]:
    """Return the stages of its pipeline that a job waits for, or takes artefacts from."""
    named = [relations.requirement(text).job for text in spec.depends_on]
    named += [relations.artefact(text).job for text in spec.inputs.values()]
    known = set(stages)
    return [job for job in dict.fromkeys(named) if job in known]


def cycle(before: Mapping[str, Sequence[str]]) -> list[str]:
    """Return jobs that wait for each other in a circle, by *before* (those each one waits for); empty without one."""
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        waited_for: list[str] = error.args[1]  # each for the next one, and the first once more
        return waited_for[:0:-1]
    return []


def _copy(document: Document) -> Document:
    return Document(copy.deepcopy(document.data), document.where, dict(document.keys), dict(document.values))
