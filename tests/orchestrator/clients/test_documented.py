"""The examples of the pages about the Python client and about a new route run as they stand."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter
from served_ledger import Served
from starlette.testclient import TestClient

from orc.launchers.errors import SpecError
from orc.launchers.spec import LoadedJob
from orc.orchestrator import ServiceClient
from orc.orchestrator.api import call as calls
from orc.orchestrator.clients import logins
from orc.orchestrator.clients.errors import NotLoggedIn
from orc.orchestrator.clients.http_session import Request, Response
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.routing import add_routes
from orc.orchestrator.service.settings import Settings

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "python-client.md"
CONNECT, EXPLICIT, ASYNC = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
Project = Callable[..., LoadedJob]


@pytest.mark.parametrize("through_service", [False, True], ids=["ledger", "service"])
def test_the_first_example_runs(
    served: Served, project: Project, monkeypatch, capfd, orc_home: Path, *, through_service: bool
) -> None:
    monkeypatch.chdir(project().base_dir)
    if through_service:
        monkeypatch.setenv(logins.URL_VARIABLE, served.url)
        monkeypatch.setenv(logins.TOKEN_VARIABLE, served.tokens["grace"])
    exec(compile(CONNECT, str(PAGE), "exec"), {})
    out = capfd.readouterr().out
    assert out.startswith("SUCCEEDED")
    assert "hello\n" in out
    assert (orc_home / "state" / "ledger.db").exists() is not through_service


def test_a_service_is_named_in_the_program(served: Served, capfd) -> None:
    exec(compile(EXPLICIT, str(PAGE), "exec"), {"url": served.url, "token": served.tokens["grace"]})
    assert capfd.readouterr().out.startswith("grace\n")


def test_the_asynchronous_example_runs(served: Served, project: Project, tmp_path: Path, capfd) -> None:
    variants = [project(name="digits", env={"LR": lr}) for lr in ("1", "2")]
    exec(
        compile(ASYNC, str(PAGE), "exec"),
        {"url": served.url, "token": served.tokens["grace"], "variants": variants},
    )
    assert capfd.readouterr().out == "['SUCCEEDED', 'SUCCEEDED']\n"


ROUTE_PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "add-a-route.md"
CALL, METHOD = re.findall(r"^```python\n(.*?)^```", ROUTE_PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module of the page, with its call and its method."""
    monkeypatch.setattr(calls, "CALLS", {})
    module = types.ModuleType("added_route")
    monkeypatch.setitem(sys.modules, "added_route", module)
    exec(compile(CALL, str(ROUTE_PAGE), "exec"), module.__dict__)
    exec(compile(METHOD, str(ROUTE_PAGE), "exec"), module.__dict__)
    return module


@pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument")
def test_the_route_of_the_page_answers_in_this_process_and_through_a_service(
    served: Served, project: Callable[..., LoadedJob], added: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(Settings(reconciler=False), open_client=served.ledger)
    router = APIRouter(prefix=calls.PREFIX)
    add_routes(router, [added.list_reservations])
    app.include_router(router)
    held = added.held
    with served.client() as client, served.ledger() as ledger, TestClient(app, base_url="http://127.0.0.1") as http:
        job = client.submit(project())
        client.wait([job.id], timeout_s=120)
        with ledger.workspace.ledger.database.write() as connection:
            connection.execute(
                "INSERT INTO reservations (cluster, host, job_id, attempt, node, slots, at) "
                "VALUES ('lab', 'n1', :job, 1, 0, 4, 1.5)",
                {"job": job.id},
            )
        service = ServiceClient("http://127.0.0.1", "orc_x")

        def exchange(request: Request[Any]) -> Response:
            got = http.request(request.method, request.path, params=dict(request.params))
            return Response(got.status_code, got.headers, got.content)

        monkeypatch.setattr(service.session.connections, "exchange", exchange)
        with pytest.raises(NotLoggedIn):
            held(service)
        http.headers["Authorization"] = f"Bearer {served.tokens['eve']}"
        assert held(service, "lab") == held(ledger, "lab") == [added.HeldHost("lab", "n1", job.id, 1, 0, 4, 1.5)]
        assert held(service, "elsewhere") == []
        with pytest.raises(SpecError, match="255"):
            held(service, "x" * 300)
        operation = http.get("/openapi.json").json()["paths"]["/api/v1/reservations"]["get"]
    assert (operation["operationId"], operation["x-orc-role"]) == ("list_reservations", "viewer")
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema["$ref"].endswith("/Reservations")
