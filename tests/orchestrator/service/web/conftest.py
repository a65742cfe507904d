"""A service with real local jobs, for all tests of a module; its pages in Chromium, watched."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from orc.launchers.spec import load_job
from orc.orchestrator.client import Client
from orc.orchestrator.views import JobView

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

_ORC = [sys.executable, "-m", "orc.orchestrator.cli.main"]
# Runs before every script of a page: what the policy refuses is kept for the test.
_WATCH = """
window.violations = [];
addEventListener('securitypolicyviolation', (event) => violations.push(event.violatedDirective));
"""


class RunningService:
    """``orc serve`` on a port of its own, over a ledger below *home*."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "ORC_STATE_DIR": str(home / "state"), "ORC_CONFIG_DIR": str(home / "config")}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._passes = threading.Thread(target=self._run_passes)

    def __enter__(self) -> RunningService:
        self.start()
        self._passes.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.client() as client:
            client.cancel([row.id for row in client.jobs(states=["QUEUED", "PENDING", "RUNNING"])], grace_s=0)
        self._stop.set()
        self._passes.join()
        self.stop()

    def _run_passes(self) -> None:
        """Look at the jobs more often than the service would: nobody waits for its next pass."""
        with self.client() as client:
            while not self._stop.wait(0.2):
                client.refresh()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with (self.home / "serve.log").open("ab") as log:
            argv = [*_ORC, "serve", "--port", str(self.port), "--no-reconciler"]
            self._process = subprocess.Popen(argv, env=self.env, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            assert self._process.poll() is None, (self.home / "serve.log").read_text()
            assert time.monotonic() < deadline, (self.home / "serve.log").read_text()
            try:
                httpx.get(f"{self.url}/healthz", timeout=5).raise_for_status()
                return
            except httpx.TransportError:
                time.sleep(0.05)

    def stop(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(30)

    def token(self, user: str, role: str) -> str:
        """A new token."""
        argv = [*_ORC, "token", "create", "--user", user, "--role", role, "--json"]
        return str(json.loads(subprocess.run(argv, env=self.env, check=True, capture_output=True).stdout)["token"])

    def job_file(self, script: str, **keys: Any) -> Path:
        """A new folder with *script* and a job file for it."""
        folder = self.home / f"project-{time.monotonic_ns()}"
        folder.mkdir()
        (folder / "train.py").write_text(script)
        job = {"name": "digits", "script": "train.py", "launcher": "python", "grace": 2, **keys}
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        return folder / "job.yaml"

    def submit(self, script: str, **keys: Any) -> JobView:
        """Submit a job of *script* to this machine, as another shell would."""
        with self.client() as client:
            return client.submit(load_job(self.job_file(script, **keys)))

    def client(self) -> Client:
        """A client of its ledger."""
        return Client(self.home / "state", reconciler=False)

    def wait_for(self, job_id: str, *states: str) -> None:
        """Wait until a job is in one of *states*."""
        deadline = time.monotonic() + 60
        while True:
            with self.client() as client:
                view = client.job(job_id)
            if view.state in states:
                return
            assert time.monotonic() < deadline, f"{job_id} is {view.state}: {view.reason}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The running service."""
    with RunningService(tmp_path_factory.mktemp("web")) as running:
        yield running


@pytest.fixture(scope="module")
def context(service: RunningService, chromium: Browser) -> Iterator[BrowserContext]:
    """A browser in which an admin is logged in, whose jobs may run as who runs the tests."""
    made = chromium.new_context(viewport={"width": 1280, "height": 900})
    made.set_default_timeout(30_000)
    made.add_init_script(_WATCH)
    cookie = {"name": "orc_session", "value": service.token(getpass.getuser(), "admin"), "url": service.url}
    made.add_cookies([{**cookie, "httpOnly": True, "sameSite": "Strict"}])
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, service: RunningService) -> Iterator[Page]:
    """A new page. It fails the test when it asks another host, breaks its policy or throws."""
    opened = context.new_page()
    errors: list[str] = []
    elsewhere: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    opened.on("request", lambda r: elsewhere.append(r.url) if not r.url.startswith((service.url, "data:")) else None)
    yield opened
    violations = opened.evaluate("window.violations")
    opened.close()
    assert not errors
    assert not elsewhere
    assert not violations


@pytest.fixture
def visit(page: Page, service: RunningService) -> Callable[[str], Page]:
    """Opens a path of the service in the page."""

    def go(path: str) -> Page:
        page.goto(service.url + path)
        return page

    return go
