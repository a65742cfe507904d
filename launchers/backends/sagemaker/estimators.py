"""From an estimator of the SageMaker SDK, or its arguments, to a job. Pure, but for the tables that it may name."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.sagemaker.sections import CHANNEL_MEMBERS, read_table
from orc.launchers.backends.sagemaker.settings import ALIASES, CLUSTER_KEYS, JOB_KEYS, REFUSED, TABLES
from orc.launchers.errors import SpecError

if TYPE_CHECKING:
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.clusters import Cluster

WHERE = "estimator"
_PLACE = ("profile", "region")  # must be the cluster's
# Attributes that estimators have without anybody having asked for them, and methods of the same name.
_OF_OBJECTS = (
    *("sagemaker_session", "model_channel_name", "container_log_level", "dependencies", "debugger_hook_config"),
    *("rules", "wait", "logs", "latest_training_job", "jobs"),
)
_PRIVATE = {"hyperparameters": "_hyperparameters", "base_job_name": "base_job_name"}


def arguments_of(estimator: object) -> dict[str, Any]:
    """The arguments that an estimator was made with: of a mapping itself, else of an object's attributes.

    What an object has as its class's default of `None`, or only for the SDK's own use, is left out.
    """
    if isinstance(estimator, Mapping):
        return {str(name): _plain(value) for name, value in estimator.items()}
    names: Iterable[str] = (*JOB_KEYS, *_PLACE, *ALIASES, *TABLES, "entry_point", "source_dir", "hyperparameters")
    names = (*names, *(name for name in REFUSED if name not in _OF_OBJECTS), "additional_args")
    found: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        value = getattr(estimator, _PRIVATE.get(name, name), None)
        if value is None or value in ([], {}, ()):
            value = getattr(estimator, name, None)
        if callable(value) and name == "hyperparameters":
            value = value()
        if value is None or callable(value) or (isinstance(value, (list, dict, tuple)) and not value):
            continue
        found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """A part of the request as such, where the SDK has an object for it (a profiler's configuration, for example)."""
    made = getattr(value, "_to_request_dict", None)
    return made() if callable(made) else value


def load_estimator(estimator: object, cluster: Cluster, *, name: str | None = None, inputs: object = None) -> LoadedJob:
    """The job that *estimator* describes, for *cluster*. *inputs* are those that its ``fit`` would get.

    Raises `SpecError` that names the argument.
    """
    from pydantic import ValidationError

    from orc.launchers.spec import JobSpec, LoadedJob

    given = arguments_of(estimator)
    more = given.pop("additional_args", None) or {}
    if not isinstance(more, Mapping):
        raise SpecError("additional_args: expected a mapping of estimator arguments", where=WHERE)
    if twice := more.keys() & given.keys():
        raise SpecError(f"{min(twice)} is given twice, also in additional_args", where=WHERE)
    given = {str(key): value for key, value in {**given, **more}.items() if value is not None and key != "max_retries"}
    _same_place(given, cluster)
    script, workdir = _program(given)
    args = _arguments(given.pop("hyperparameters", {}))
    for key, (proper, columns) in TABLES.items():
        if key in given:
            given[proper], _ = read_table(str(given.pop(key)), WHERE, columns)
    if inputs is not None:
        channels = inputs if isinstance(inputs, Mapping) else {"training": inputs}
        given["inputs"] = {channel: _input(entry) for channel, entry in channels.items()}
    data = {
        "name": name or given.get("base_job_name") or Path(script).stem,
        "script": script,
        "cluster": cluster.name,
        "args": args,
        "resources": {"options": {"sagemaker": given}},
    }
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        from orc.launchers.spec.problems import SpecProblems, translate
        from orc.launchers.spec.source import Document

        raise SpecProblems(translate(error, Document(data, WHERE, {}, {}), lambda *_: "")) from None
    return LoadedJob(spec, workdir / WHERE, workdir)


def _same_place(given: dict[str, Any], cluster: Cluster) -> None:
    for key in _PLACE:
        value, own = given.pop(key, None), cluster.options.get(key)
        if value is not None and value != own:
            what = f"{key} = {value}, but that of the cluster {cluster.name} is {own}"
            raise SpecError(what, where=WHERE, hint="Define a cluster for it in clusters.yaml, and name that.")
    for key in CLUSTER_KEYS:
        if key in given and key not in TABLES:
            raise SpecError(f"{key} describes the cluster", where=WHERE, hint="Set it in clusters.yaml.")


def _program(given: dict[str, Any]) -> tuple[str, Path]:
    """The script, relative to the directory that travels; and that directory."""
    entry, source = given.pop("entry_point", None), given.pop("source_dir", None)
    if not entry:
        raise SpecError("there is no entry_point", where=WHERE, hint="Give the script that is to be run.")
    if str(source or "").startswith(("s3://", "git@", "https://")):
        raise SpecError(f"source_dir: {source} is not on this machine", where=WHERE, hint="Give a local directory.")
    script = Path(str(entry))
    if source:
        workdir = Path(str(source)).expanduser().absolute()
        if script.is_absolute():
            if not script.is_relative_to(workdir):
                raise SpecError(f"entry_point: {script} is not in source_dir", where=WHERE)
            script = script.relative_to(workdir)
    else:
        script = script.expanduser().absolute()
        workdir, script = script.parent, Path(script.name)
    if not (workdir / script).is_file():
        raise SpecError(f"entry_point: there is no file {workdir / script}", where=WHERE)
    return posixpath.join(*script.parts), workdir


def _arguments(given: object) -> list[str]:
    """``{"epochs": 3, "fp16": True}`` as ``--epochs 3 --fp16 True``: what the SDK's containers make of it."""
    if not isinstance(given, Mapping):
        raise SpecError("hyperparameters: expected a mapping", where=WHERE)
    words: list[str] = []
    for key, value in given.items():
        if value is None:
            continue
        try:
            text = str(value) if isinstance(value, (str, bool, int, float)) else json.dumps(value)
        except TypeError:
            raise SpecError(f"hyperparameters: {key}: {value!r} cannot be written as JSON", where=WHERE) from None
        words += [f"--{key}={text}"] if text.startswith("-") else [f"--{key}", text]
    return words


def _input(given: object) -> Any:
    """Return an S3 URI or a mapping as it is, and as a mapping an input of the SDK, whose ``config`` is its request."""
    config = getattr(given, "config", None)
    if not isinstance(config, Mapping):
        return given
    found = {}
    for key, path in CHANNEL_MEMBERS.items():
        value: Any = config
        for member in path.split("."):
            value = (value or {}).get(member)
        if value is not None:
            found[key] = value
    return found
