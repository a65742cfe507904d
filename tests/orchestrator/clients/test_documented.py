"""The examples of the Python client's reference run as they stand: against a ledger, a service, and with asyncio."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from served_ledger import Served

from orc.launchers.spec import LoadedJob
from orc.orchestrator.clients import logins

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
