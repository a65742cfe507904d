"""Every route is asked for what its OpenAPI description allows, and for what it does not."""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck
from running_service import Running
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

# Streams do not end; tests/orchestrator/service/test_streams.py has them.
STREAMS = re.compile("/stream$")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_every_route_answers_as_its_description_says(running: Running) -> None:
    with running.http() as http:
        document = http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document).exclude(path_regex=STREAMS)
    schema.config.base_url = running.url
    headers = {"Authorization": f"Bearer {running.tokens['ada']}", "X-Orc-Request": "1"}
    asked = []
    for found in schema.get_all_operations():
        operation = found.ok()

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(max_examples=12, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        def ask(case: Any) -> None:
            case.headers = {**(case.headers or {}), **headers}
            answer = case.call(timeout=60)
            case.validate_response(answer, checks=CHECKS)

        ask()
        asked.append(operation.label)
    assert len(asked) > 15
    assert any(label.startswith("POST") for label in asked)
