"""JSON Schema of job.yaml and clusters.yaml, for editors: what may be written, short forms and references included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from orc.launchers.spec.clusters import LOCAL, Cluster
from orc.launchers.spec.groups import OF_GROUP, STAGE
from orc.launchers.spec.job import JobSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# A value that an environment variable or another key gives: its type shows when the file is read.
_REFERENCE = {"type": "string", "pattern": r"\$\{"}
_SCALAR = {"type": ["string", "number", "boolean"]}


def job_schema() -> dict[str, Any]:
    """Return the schema of a job file."""
    schema = _finished(JobSpec.model_json_schema(), "A job of orc, or a pipeline of them: docs/reference/job-yaml.md")
    required = schema.pop("required")
    # Where a program is needed, one of three keys will do, and no editor has to know which.
    schema["anyOf"] = [{"required": [*required, key]} for key in ("script", "module", "command")]
    schema["anyOf"].append({"required": ["jobs"]})
    stage = {key: value for key, value in schema["properties"].items() if key not in OF_GROUP}
    schema["$defs"]["Stage"] = {
        "type": "object",
        "description": "Keys of a job: what the pipeline says for all of its jobs need not be said again.",
        "properties": stage,
        "additionalProperties": False,
    }
    schema["properties"]["jobs"] = {
        "type": "object",
        "description": "The jobs of a pipeline, by name; the other keys are those of all of them.",
        "minProperties": 1,
        "propertyNames": {"pattern": f"^{STAGE}$"},
        "additionalProperties": {"$ref": "#/$defs/Stage"},
    }
    return schema


def clusters_schema(options: Mapping[str, type[BaseModel]] | None = None) -> dict[str, Any]:
    """Return the schema of a clusters file: a cluster by each name. *options* are the models of options, by kind."""
    schema = _finished(Cluster.model_json_schema(), "")
    definitions = schema.pop("$defs", {})
    del schema["properties"]["name"], schema["$schema"]
    conditions = []
    for kind, model in (options or {}).items():
        raw = model.model_json_schema(ref_template=f"#/$defs/{kind}.{{model}}")
        own = _finished(raw, f"Options of a cluster of kind {kind}")
        del own["$schema"]
        definitions |= {f"{kind}.{name}": inner for name, inner in own.pop("$defs", {}).items()}
        definitions[f"{kind} options"] = own
        then = {"properties": {"options": {"$ref": f"#/$defs/{kind} options"}}}
        conditions.append({"if": {"properties": {"kind": {"const": kind}}}, "then": then})
    definitions["Cluster"] = schema | {"required": ["kind"]} | ({"allOf": conditions} if conditions else {})
    definitions["Local"] = schema | {"required": []}
    return {
        "$schema": DIALECT,
        "title": "Clusters of orc: docs/reference/clusters-yaml.md",
        "type": "object",
        "properties": {LOCAL: {"$ref": "#/$defs/Local"}},
        "additionalProperties": {"$ref": "#/$defs/Cluster"},
        "$defs": definitions,
    }


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {"job": job_schema, "clusters": clusters_schema}


def _finished(schema: dict[str, Any], title: str) -> dict[str, Any]:
    loosened: dict[str, Any] = _loosened(schema)
    return {"$schema": DIALECT, **loosened, "title": title}


def _loosened(node: Any) -> Any:
    """Return *node* with references where a number is expected, plain values for texts, `null` for no value."""
    if isinstance(node, list):
        return [_loosened(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {
        key: {name: _nullable(_loosened(item)) for name, item in value.items()}
        if key == "properties" and isinstance(value, dict)
        else _loosened(value)
        for key, value in node.items()
        if key != "title"
    }
    kind = found.get("type")
    if kind in ("integer", "number", "boolean"):
        rest = {key: found.pop(key) for key in ("description", "default") if key in found}
        return {"anyOf": [found, _REFERENCE], **rest}
    if kind == "string" and not found.keys() - {"type", "description", "default", "minLength", "maxLength"}:
        return {**found, **_SCALAR}
    return found


def _nullable(node: dict[str, Any]) -> dict[str, Any]:
    """Return *node*, a key's value, with `null`, which means that the key is not given."""
    rest: dict[str, Any] = {key: node[key] for key in ("description", "default") if key in node}
    inner = {key: value for key, value in node.items() if key not in rest}
    if {"type": "null"} in inner.get("anyOf", ()) or not inner:
        return node
    return {"anyOf": [inner, {"type": "null"}], **rest}
