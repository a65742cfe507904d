"""The plan of one attempt: ``agent.json`` for its agents, and the request that starts the training job. Pure.

A request is checked by the API's own model, which botocore brings, before AWS sees it and without a network. botocore
itself looks at types and required members when it sends a request; patterns, lengths and enumerations are in the same
model, and AWS alone looks at those.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from orc.launchers.attempts.agent_config import agent_file
from orc.launchers.backends.sagemaker.images import is_pending
from orc.launchers.backends.sagemaker.names import ACCOUNT
from orc.launchers.backends.sagemaker.request import (
    adapt_job,
    checkpoint_uri,
    instance_of,
    local_path,
    request_text,
    s3_location_of,
    training_request,
)
from orc.launchers.backends.sagemaker.settings import Settings, option_of, place_of_option, read_settings
from orc.launchers.containers.layout import AGENT, RECORDS, ContainerLayout, container_config, source_digest
from orc.launchers.errors import RenderError
from orc.launchers.plan import Plan, PlanCommand, PlanFile
from orc.launchers.spec.clusters import environment_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from botocore.model import Shape, StructureShape

    from orc.launchers.agent.config import AgentConfig
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.ids import AttemptId
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.environment import Environment

ROOT = "/opt/ml/orc"
DEFAULT_PYTHON = "python3"
_CREATE = "CreateTrainingJob"
REQUEST = "request.json"
_HINTS = {
    "arguments": "Pass them as they are, without hyperparameters: resources.options.sagemaker.arguments: plain.",
    "environment": "The job's own `env` has no limits.",
}


def render_plan(
    job: JobSpec, snapshot: Snapshot, attempt: AttemptId, cluster: Cluster, settings: Settings, region: str
) -> Plan:
    """Two files and one command. Raises `RenderError` for a job that SageMaker cannot carry."""
    asked, job = job, adapt_job(job, settings)
    instance = instance_of(job, settings)
    location = s3_location_of(settings, region)
    config = _config(job, snapshot, attempt, cluster, settings, region)
    plain = settings.arguments == "plain"
    request = training_request(
        job,
        attempt,
        settings,
        instance,
        region=region,
        snapshot=source_digest(snapshot),
        python=cluster.python or DEFAULT_PYTHON,
        hyperparameters={} if plain else hyperparameters(job.argv, f"{job.name}: args"),
    )
    _check_by_model(request, asked, cluster)  # which has the places
    place = location.attempt(attempt)
    agents = PlanFile(place + AGENT, agent_file(config).content, 0o600)
    order = PlanFile(place + REQUEST, request_text(request), 0o600)
    create = PlanCommand((f"sagemaker:{_CREATE}", order.path), purpose=f"start it in {region}")
    secrets = tuple(job.secrets)
    return Plan(attempt, cluster.name, "sagemaker", (agents, order), (create,), config.env, snapshot.digests, secrets)


def _check_by_model(request: Mapping[str, Any], job: JobSpec, cluster: Cluster) -> None:
    """Raise `RenderError` for the first part of the request that AWS would refuse, with the key that it comes from."""
    algorithm = request["AlgorithmSpecification"]
    known = {} if is_pending(algorithm["TrainingImage"]) else algorithm
    text = json.dumps({**request, "AlgorithmSpecification": {**algorithm, "TrainingImage": "", **known}})
    for member, why in violations(json.loads(text.replace(ACCOUNT, "0" * 12))):
        name = option_of(member)
        what = f"{name or member}: {why}" + ("" if name is None or member.count(".") < 2 else f" ({member})")
        hint = _HINTS.get(name or "", "")
        raise RenderError(what, where=place_of_option(name, cluster, job) if name else job.name, hint=hint)


def request_of(plan: Plan) -> dict[str, Any]:
    """The request in a plan."""
    request: dict[str, Any] = json.loads(plan.files[1].content)
    return request


def _config(
    job: JobSpec, snapshot: Snapshot, attempt: AttemptId, cluster: Cluster, settings: Settings, region: str
) -> AgentConfig:
    setup = [*cluster.setup, *job.setup]
    python = cluster.python or DEFAULT_PYTHON
    if settings.install_requirements and (line := _requirements(job, environment_of(job, cluster), snapshot, python)):
        setup = [line, *setup]
    layout = ContainerLayout.of(snapshot, ROOT, code="/opt/ml/code", kept=local_path(settings))
    hosts = [f"algo-{node + 1}" for node in range(job.resources.max_nodes)]
    image = "resources.options.sagemaker.image_uri; it must be in ECR"
    config = container_config(job, snapshot, attempt, cluster, layout, hosts=hosts, setup=setup, image=image)
    _check_checkpoints(job, config, settings)
    if not job.secrets:
        return config
    if settings.place.secrets == "secretsmanager":
        kept = {"from": "secretsmanager", "id": secret_name(attempt), "region": region}
        return config.replace(backend={"secrets": kept})
    return config.replace(backend={"secrets": {"from": "channel"}})


def checkpoints_of(job: JobSpec, job_id: str, cluster: Cluster) -> str:
    """Return the place of a job's checkpoints in S3, for people."""
    from orc.launchers.ids import AttemptId

    settings = read_settings(cluster, job)
    location = s3_location_of(settings, settings.place.region or "<region>")
    kept = checkpoint_uri(settings, location, AttemptId(job_id, 1))
    return f"{kept}/{RECORDS}/{job_id}/{job.checkpoint.dir}" if job.checkpoint.dir else kept


def secret_name(attempt: AttemptId) -> str:
    """Return the name of an attempt's secrets in Secrets Manager."""
    return f"orc/{attempt.marker}"


def _requirements(job: JobSpec, environment: Environment, snapshot: Snapshot, python: str) -> str | None:
    """The documented installation of the requirements.txt beside the script, in the Python of the container."""
    if environment.kind in ("venv", "conda", "copy"):
        return None  # it says itself what is installed
    beside = posixpath.join(posixpath.dirname(job.script or ""), "requirements.txt")
    path = next((name for name in (beside, "requirements.txt") if name in snapshot.code), None)
    if path is None:
        return None
    import shlex

    return shlex.join([python, "-m", "pip", "install", "--disable-pip-version-check", "-r", path])


def _check_checkpoints(job: JobSpec, config: AgentConfig, settings: Settings) -> None:
    """A directory outside of what SageMaker keeps is gone with the instances."""
    given = config.env.get("ORC_CHECKPOINT_DIR", "")
    kept = f"{local_path(settings)}/"
    if "://" in given or f"{given}/".startswith(kept) or given.startswith("/opt/ml/input/data/"):
        return
    what = f"checkpoint.dir = {given} is lost when the training job ends, because only {kept} is kept in S3"
    hint = "Leave checkpoint.dir out, give a path below that directory, or an s3:// URL."
    raise RenderError(what, where=job.name, hint=hint)


_NUMBER = re.compile(r"-(?:\d|\.\d|inf|nan)")
_HELP = (
    "On SageMaker every argument is `--name value`. To pass arguments as they are, without hyperparameters, set "
    "resources.options.sagemaker.arguments: plain."
)


def hyperparameters(argv: Sequence[str], where: str) -> dict[str, str]:
    """``--epochs 3 --fp16 True`` as ``{"epochs": "3", "fp16": "True"}``.

    Raises `RenderError` for bare flags, positionals and repeated names.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not _is_name(word):
            raise RenderError(f"the argument {_cut(word)} has no name", where=where, hint=_hint(argv, position - 1))
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            if position == len(argv) or _is_name(argv[position]):
                hint = (
                    f"Write `{word} True`, and let the script read it as a value (not as an argparse action). {_HELP}"
                )
                raise RenderError(f"the flag {word} has no value", where=where, hint=hint)
            value = argv[position]
            position += 1
        if name in found:
            raise RenderError(f"the argument {word.partition('=')[0]} is given twice", where=where, hint=_HELP)
        found[name] = value
    return found


def _is_name(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and word != "--" and not _NUMBER.match(word)


def _hint(argv: Sequence[str], position: int) -> str:
    if position >= 2 and _is_name(argv[position - 2]) and not _is_name(argv[position - 1]):
        name = argv[position - 2].partition("=")[0]
        both = f"{argv[position - 1]},{argv[position]}"
        return f"{name} has a value already; several go into one, like `{name} {both}`. {_HELP}"
    return _HELP


@cache
def request_shape() -> StructureShape | None:
    """Return the shape of CreateTrainingJob requests; `None` where botocore is not installed."""
    try:
        from botocore.loaders import create_loader
        from botocore.model import ServiceModel
    except ModuleNotFoundError:
        return None
    service = ServiceModel(create_loader().load_service_model("sagemaker", "service-2"))
    return service.operation_model("CreateTrainingJob").input_shape


def violations(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the members of *request* (``VpcConfig.Subnets``) that AWS would refuse, and why; none without botocore."""
    if (shape := request_shape()) is not None:
        yield from _violations(request, shape, "")


def _violations(value: Any, shape: Shape, name: str) -> Iterator[tuple[str, str]]:
    from botocore.validate import ParamValidator

    kinds = {"structure": Mapping, "map": Mapping, "list": list}
    kind = kinds.get(shape.type_name)
    fits = isinstance(value, kind) if kind else not ParamValidator().validate(value, shape).has_errors()
    if not fits:
        yield name, f"{_cut(value)} is no {shape.type_name}"
    elif shape.type_name == "structure":
        yield from ((name, f"{member} is missing") for member in shape.required_members if member not in value)
        for key, each in value.items():
            if key not in shape.members:
                yield name, f"unknown key {key!r}{_nearest(key, shape.members)}"
            else:
                yield from _violations(each, shape.members[key], f"{name}.{key}".lstrip("."))
    elif why := _broken_rule(value, shape.metadata):
        yield name, why
    elif shape.type_name == "list":
        for each in value:
            yield from _violations(each, shape.member, name)
    elif shape.type_name == "map":
        for key, each in value.items():
            yield from _violations(key, shape.key, name)
            yield from _violations(each, shape.value, name)


def _broken_rule(value: Any, rules: Mapping[str, Any]) -> str:
    if isinstance(value, bool):
        return ""
    counted = not isinstance(value, (int, float))
    size = len(value) if counted else value
    what = f"{len(value)} {'characters' if isinstance(value, str) else 'entries'}" if counted else str(value)
    if "min" in rules and size < rules["min"]:
        return f"{what}; it takes {rules['min']} at least"
    if "max" in rules and size > rules["max"]:
        return f"{what}; it takes {rules['max']} at most"
    if "enum" in rules and value not in rules["enum"]:
        known = f" ({', '.join(rules['enum'])})" if len(rules["enum"]) <= 10 else ""
        return f"{_cut(value)} is none of its values{_nearest(value, rules['enum'])}{known}"
    if "pattern" in rules and not _matches(rules["pattern"], value):
        return f"{_cut(value)} does not match {rules['pattern']}"
    return ""


def _matches(pattern: str, value: str) -> bool:
    """Return whether *value* matches a pattern of the model, which is Java's: its classes stand inside brackets."""
    for java, ours in (("L", r"\w"), ("N", r"\d"), ("Z", r"\s"), ("Alnum", "A-Za-z0-9")):
        pattern = pattern.replace(f"\\p{{{java}}}", ours)
    try:
        return re.fullmatch(pattern, value) is not None
    except re.error:  # a class that Python has no word for: AWS says what it thinks of it
        return True


def _nearest(word: Any, known: Any) -> str:
    from orc.launchers.spec.problems import nearest

    return nearest(str(word), list(known))


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
