"""Loading a job file: read, override, interpolate, validate, check that the script exists.

What is needed only for overrides, references or complaints is imported only then: most starts need none of it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from orc.launchers.errors import SpecError
from orc.launchers.plugins import BACKENDS, COMMANDS
from orc.launchers.spec import source
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.job import PROGRAMS, JobSpec
from orc.launchers.spec.options import field_at, keys_of, section_at
from orc.launchers.spec.source import Document, KeyPath, Origin, Reading, parse_value, place_of
from orc.runtime.core.config import JOB_KEYS

if TYPE_CHECKING:
    from orc.launchers.spec.problems import Problem


def apply_override(document: Document, override: str, reading: Callable[[KeyPath], Reading]) -> None:
    """Change *document* by one ``key.path=VALUE``; the value is YAML. Raises `SpecError`.

    Errors name ``--set``, or the option that stands for it: the place of a `PlacedText`.
    """
    name, equals, text = override.partition("=")
    where = place_of(override, f"--set {override if len(override) <= 80 else override[:77] + '...'}")
    path: KeyPath = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise SpecError("expected key.path=VALUE", where=where, hint="for example --set resources.nodes=4")
    try:
        override.encode()
    except UnicodeEncodeError:
        raise SpecError("the override is not valid UTF-8", where=repr(where)) from None
    try:
        value = parse_value(text, where, path, reading)
    except SpecError as error:
        # A line and a column in so short a text say nothing.
        raise SpecError(error.what, where=where, hint=error.hint) from None
    # A variable may well be empty; elsewhere no value means the default.
    empty = "" if len(path) == 2 and path[0] == "env" and not text.strip() else None
    put_value(document, path, value.data[""] if empty is None else empty, where, value)


def put_value(document: Document, path: KeyPath, value: Any, where: str, origins: Document | None = None) -> None:
    """Set *value* at *path*, making the mappings on the way; its origin becomes *where*."""
    origin = Origin(where, (1 << 30, 0))
    target: Any = document.data
    for depth, part in enumerate(path[:-1], start=1):
        inner = target.get(part)
        if inner is None:
            document.keys[path[:depth]] = document.values[path[:depth]] = origin
            inner = target[part] = {}
        elif isinstance(inner, str) and path[:depth] in (("launcher",), ("workdir",)):
            # The short form of these sections is a text; make it the long form.
            inner = target[part] = {"kind" if part == "launcher" else "path": inner}
        elif not isinstance(inner, dict):
            from orc.launchers.spec.problems import dotted

            raise SpecError(f"{dotted(path[:depth])} is not a mapping, so {dotted(path)} cannot be set", where=where)
        target = inner
    for table in (document.keys, document.values):
        for known in [known for known in table if known[: len(path)] == path]:
            del table[known]
    document.keys[path] = document.values[path] = origin
    if origins is not None:
        document.keys.update(origins.keys)
        document.values.update(origins.values)
    if value is None:
        target.pop(path[-1], None)
    else:
        target[path[-1]] = value


_OF_ACCELERATE = ("compute_environment", "distributed_type", "num_processes", "num_machines")
# Where standard input and `<(...)` have their names: no places beside which anything of the job could lie.
_STREAMS = ("/dev", "/dev/fd", "/proc/self/fd")
_TEXTUAL = frozenset({"name", "script", "module", "command", "cluster", "env", "secrets", "setup", "tags", "workdir"})


class LoadedJob(NamedTuple):
    """Job and its file: `base_dir` is the directory that its relative paths start from."""

    spec: JobSpec
    source_path: Path
    base_dir: Path

    @property
    def workdir(self) -> Path:
        """The directory that travels with the job."""
        return self.base_dir / self.spec.workdir.path

    def after(self, jobs: Sequence[str]) -> LoadedJob:
        """Return the job as one that waits for *jobs*, too: ``JOB[:CONDITION]``. Raises `SpecError`."""
        if not jobs:
            return self
        try:
            return self._replace(spec=self.spec.model_copy(update={"depends_on": [*self.spec.depends_on, *jobs]}))
        except ValidationError as error:
            raise SpecError(str(error.errors()[0]["ctx"]["error"]), where="--after") from None


class Examined(NamedTuple):
    """A job file, examined by itself: its document, what is wrong, and the job that the rest describes."""

    document: Document
    problems: list[Problem]
    loaded: LoadedJob | None  # of what is right; `None` where nothing can be made of that

    def job(self) -> LoadedJob:
        """Return the job. Raises `SpecProblems` with everything that is wrong."""
        if self.problems or self.loaded is None:
            from orc.launchers.spec.problems import SpecProblems

            raise SpecProblems(self.problems)
        return self.loaded


def load_job(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, cluster: str | None = None) -> LoadedJob:
    """Return the job in the file *path*; ``-`` is standard input, with paths relative to the current directory.

    *overrides* are ``key.path=VALUE`` texts, applied in order; *cluster* goes over all of them. Raises `SpecError` with
    everything that is wrong.
    """
    return examine(path, overrides, cluster).job()


def examine(path: str | os.PathLike[str], overrides: Sequence[str] = (), cluster: str | None = None) -> Examined:
    """Return all that is wrong with a job file at once; arguments as for `load_job`.

    Raises `SpecError` for what cannot be read as YAML, and for an override that cannot be applied.
    """
    document, source_path = read_job_file(path, overrides, cluster)
    if "jobs" in document.data:
        raise SpecError(
            "this is a pipeline of several jobs",
            where=str(source_path),
            hint="`orc submit` and `orc render` take those",
        )
    return examine_document(document, source_path)


def read_job_file(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), cluster: str | None = None
) -> tuple[Document, Path]:
    """Return the data of a job file with *overrides*, not checked yet, and the path of the file. Raises `SpecError`.

    A Python script stands for the job file that `job_of_script` makes of it.
    """
    source_path = Path("/dev/stdin" if path == "-" else path)
    if source_path.suffix == ".py":
        document = job_of_script(source_path)
    else:
        document = source.parse(source.read_file(source_path, "job file"), str(source_path), reading)
        _refuse_accelerate(document, source_path)
    if overrides or cluster is not None:
        for override in overrides:
            apply_override(document, override, reading)
        if cluster is not None:
            put_value(document, ("cluster",), cluster, f"--cluster {cluster}")
    return document, source_path


def job_of_script(path: Path) -> Document:
    """Return the job file that runs the script *path* as it is.

    The code that travels with it is the current directory where the script lies below that, else the script's own.
    """
    folder, here = Path(os.path.abspath(path)).parent, _base_dir(Path("job.yaml"))  # noqa: PTH100  resolves no links
    workdir = here if folder.is_relative_to(here) else folder
    data: dict[str, Any] = {"name": path.stem, "script": os.path.relpath(folder / path.name, workdir)}
    if workdir != folder:
        data["workdir"] = os.path.relpath(workdir, folder)
    return Document(data, str(path), {}, {})


def examine_document(document: Document, source_path: Path) -> Examined:
    """Return all that is wrong with one job of a job file, whose data is *document*. Raises `SpecError`."""
    base = _base_dir(source_path)
    problems = _interpolate(document) if document.has_references() else []
    spec: JobSpec | None
    try:
        spec = JobSpec.model_validate(document.data)
    except ValidationError as error:
        from orc.launchers.spec.problems import translate

        places = {problem.where for problem in problems}  # a reference that is no value yet is no value of a wrong kind
        problems += [found for found in translate(error, document, suggest) if found.where not in places]
        spec = valid_part(document.data, error)
    if spec is None:
        return Examined(document, problems, None)
    loaded = LoadedJob(spec, source_path, base)
    problems += [*_check_kinds(spec, document), *_check_files(loaded, document)]
    _place_options(spec, document)
    return Examined(document, problems, loaded)


def _refuse_accelerate(document: Document, path: Path) -> None:
    """Raise `SpecError` for a configuration file of Accelerate, which has options of a launch but no script."""
    found = [key for key in _OF_ACCELERATE if key in document.data]
    if found and not any(key in document.data for key in ("script", "module", "command")):
        import shlex

        raise SpecError(
            "this is a configuration file of Accelerate, not a job file",
            where=document.origin((found[0],), key=True).where,
            hint=f"`orc config convert {shlex.quote(str(path))} --out DIR` makes a job file of it",
        )


def _base_dir(path: Path) -> Path:
    """Return the directory that the relative paths of the job file *path* start from. Raises `SpecError`."""
    try:
        absolute = path.absolute()
        return Path.cwd() if str(absolute.parent) in _STREAMS else absolute.parent
    except FileNotFoundError:
        raise SpecError("the current directory was removed", where=str(path)) from None


def validate(document: Document) -> JobSpec:
    """Return the job that *document* describes. Raises `SpecProblems`."""
    try:
        return JobSpec.model_validate(document.data)
    except ValidationError as error:
        from orc.launchers.spec.problems import SpecProblems, translate

        raise SpecProblems(translate(error, document, suggest)) from None


def reading(path: KeyPath) -> Reading:
    """Return the reading of scalars at *path*: texts for processes are taken as written (``1.10``, ``007``)."""
    if path[:1] == ("sweep",):  # the values of a sweep are read as where they will stand
        from orc.launchers.spec.sweep import target_of

        path = target_of(path)
    if path[:1] == ("jobs",):  # of a pipeline
        path = path[2:]
    if not path:
        return "typed"
    if path[0] in _TEXTUAL or path == ("checkpoint", "dir") or path[:3] == ("environment", "venv", "python"):
        return "text"
    if path[0] == "args":
        # In a mapping, true, false and null say whether a flag is there at all.
        return "flags" if len(path) == 2 and isinstance(path[1], str) else "text"
    return "typed"


def known_keys(path: KeyPath) -> Sequence[str]:
    """Return the valid keys of the mapping at *path* of a job file; empty where any key is allowed."""
    if path == ("runtime",):
        return JOB_KEYS
    owner = section_at(JobSpec, path)
    return keys_of(owner) if owner else ()


def suggest(path: KeyPath, name: str) -> str:
    """Return the suggestion for the unknown key *name* of the section at *path*: its right place, or a similar key."""
    from orc.launchers.spec.problems import closest, nearest

    sections = {key: known_keys((key,)) for key in keys_of(JobSpec)}
    # Many sections have a `kind`: in another one, the launcher's is not what was meant.
    everywhere = path and name == "kind"
    homes = [f"{section}.{name}" for section, keys in sections.items() if name in keys and not everywhere]
    if path and name in sections:
        homes.append(f"{name}, at the top of the file")
    if homes:
        return f", did you mean {' or '.join(homes)}?"
    valid = known_keys(path)
    if not path and not any(key.startswith(f"{name}_") for key in valid):
        begun = [f"{section}.{key}" for section, keys in sections.items() for key in keys if key.startswith(f"{name}_")]
        if begun:
            return f", did you mean {begun[0]!r}?"
    if near := nearest(name, valid):
        return near
    if not path and (key := closest(name, [key for keys in sections.values() for key in keys])):
        home = next(section for section, keys in sections.items() if key in keys)
        return f", did you mean '{home}.{key}'?"
    return f"; known are {', '.join(valid)}"


def _default(path: KeyPath) -> Any:
    """Return the default of a key. Raises `KeyError` with the nearest key when there is no such one."""
    owner = section_at(JobSpec, path[:-1])
    field = field_at(owner, path[-1]) if owner else None
    if field is None:
        from orc.launchers.spec.problems import nearest

        raise KeyError(nearest(str(path[-1]), known_keys(path[:-1])))
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _interpolate(document: Document) -> list[Problem]:
    from orc.launchers.spec.interpolation import Interpolation

    listed = document.data.get("secrets")
    secrets = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
    return Interpolation(document, secrets, reading, _default).run()


def _place_options(spec: JobSpec, document: Document) -> None:
    """Give options and files of the snapshot their places: they are checked after the file was read."""
    options = {
        kind: source.Placed(given, document, ("resources", "options", kind)) if isinstance(given, Mapping) else given
        for kind, given in spec.resources.options.items()
    }
    if options:
        spec.resources.__dict__["options"] = options
    if spec.launcher.options:
        placed = source.Placed(spec.launcher.options, document, ("launcher", "options"))
        spec.launcher.__dict__["options"] = placed
    venv, conda = spec.environment.venv, spec.environment.conda
    if venv is not None:
        venv.__dict__["requirements"] = _placed(venv.requirements, document, ("environment", "venv", "requirements"))
    if conda is not None and conda.file is not None:
        conda.__dict__["file"] = _placed(conda.file, document, ("environment", "conda", "file"))


def _placed(text: str, document: Document, path: KeyPath) -> str:
    """Return *text* with its place at *path*, or at the short form one step above."""
    return source.PlacedText.at(text, document.origin(path if path in document.values else path[:-1]).where)


def _check_kinds(spec: JobSpec, document: Document) -> list[Problem]:
    """Check that the launcher and the backends that are named are installed."""
    found = []
    if not COMMANDS.has(spec.launcher.kind):
        from orc.launchers.spec.problems import at, choose

        what = f"unknown launcher {spec.launcher.kind!r}{choose(spec.launcher.kind, COMMANDS.kinds())}"
        long_form: KeyPath = ("launcher", "kind")
        found.append(at(document, long_form if long_form in document.values else ("launcher",), what))
    for kind in spec.resources.options:
        if not BACKENDS.has(kind):
            from orc.launchers.spec.problems import at, choose

            what = f"unknown kind of backend {kind!r}{choose(kind, BACKENDS.kinds())}"
            found.append(at(document, ("resources", "options", kind), what, key=True, shown=("resources", "options")))
    return found


def _check_files(loaded: LoadedJob, document: Document) -> list[Problem]:
    """Check that the workdir can be read and holds the script."""
    workdir, script = loaded.workdir, loaded.spec.script
    long_form: KeyPath = ("workdir", "path")
    place = long_form if long_form in document.values else ("workdir",)
    what = _unusable(workdir)
    if not what and script is not None:
        place, what = ("script",), _no_script(workdir, script)
    if not what:
        return []
    from orc.launchers.spec.problems import at

    return [at(document, place, what)]


def _unusable(workdir: Path) -> str:
    shown = os.path.normpath(workdir)
    try:
        # Listing it is the one test that holds for every reason (missing, a file, no permission, a dead mount).
        with os.scandir(workdir) as entries:
            next(entries, None)
    except FileNotFoundError:
        return f"{shown} does not exist"
    except NotADirectoryError:
        return f"{shown} is not a directory"
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror}"
    return ""


def _no_script(workdir: Path, script: str) -> str:
    path = workdir / script
    try:
        if path.is_file():
            if path.resolve().is_relative_to(workdir.resolve()):
                return ""
            return f"{script!r} is a link to a file outside the workdir: only the workdir travels to the nodes"
        if path.is_dir():
            return f"{script!r} is a directory, not a file"
        siblings = [entry.name for entry in path.parent.iterdir() if entry.is_file()] if path.parent.is_dir() else []
    except OSError as error:
        return f"{script!r} cannot be looked up: {error.strerror}"
    from orc.launchers.spec.problems import nearest

    return f"there is no file {script!r} in {os.path.normpath(workdir)}{nearest(path.name, siblings)}"


_ROUNDS = 3  # what is wrong only without other mistakes comes up in the next one


def valid_part(data: dict[str, Any], error: ValidationError) -> JobSpec | None:
    """Return the job that *data* describes without what *error* is about; `None` where nothing can be made of it."""
    rest = copy.deepcopy(data)
    for _ in range(_ROUNDS):
        for path in _paths(error):
            _remove(rest, path)
        rest.setdefault("name", "unnamed")
        if all(rest.get(program) is None for program in PROGRAMS):
            rest["command"] = "true"
        try:
            return JobSpec.model_validate(rest)
        except ValidationError as again:
            error = again
    return None


def _paths(error: ValidationError) -> Iterator[KeyPath]:
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        inner = [path for path, _ in cause.problems] if isinstance(cause, LocatedError) else [()]
        for path in inner:
            yield (*item["loc"], *path)


def _remove(data: Any, path: KeyPath) -> None:
    """Remove the value at *path*; of a list, and of what holds no such key, the whole."""
    owner, key = data, path[0] if path else None
    while key in owner and isinstance(owner[key], dict) and len(path) > 1 and path[1] in owner[key]:
        owner, path = owner[key], path[1:]
        key = path[0]
    owner.pop(key, None)
