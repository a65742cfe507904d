"""What is sent is what OpenAPI says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


def _undeclared(value: Any, schema: dict[str, Any], schemas: dict[str, Any], where: str) -> list[str]:
    """Return the keys of *value*, at any depth, that its schema does not have."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for one in schema.get("anyOf", ()):
        if value is not None and one.get("type") != "null":
            return _undeclared(value, one, schemas, where)
    if isinstance(value, list):
        return [key for item in value for key in _undeclared(item, schema.get("items", {}), schemas, where)]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    found = [f"{where}.{key}" for key in value if key not in known]
    return found + [
        one for key in value if key in known for one in _undeclared(value[key], known[key], schemas, f"{where}.{key}")
    ]


@pytest.mark.parametrize(
    "path",
    [
        *("jobs", "jobs/{job}", "jobs/{job}/events", "jobs/{job}/logs"),
        *("clusters", "tokens", "audit", "quotas", "schedules"),
    ],
)
def test_an_answer_has_the_fields_of_its_model_and_no_others(running: Any, path: str) -> None:
    document = httpx.get(f"{running.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    with running.http() as http:
        job = http.get("/api/v1/jobs").json()["jobs"][0]["id"]
        answer = http.get(f"/api/v1/{path.format(job=job)}")
    assert answer.status_code == 200
    operation = document["paths"][f"/api/v1/{path.format(job='{job_id}')}"]["get"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert sorted(set(_undeclared(answer.json(), schema, schemas, path))) == []
