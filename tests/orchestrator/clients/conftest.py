"""A real service on a free port, over a ledger with this machine as its cluster; passes run all the time."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from served_ledger import Served

from orc.launchers.spec import LoadedJob, load_job
from orc.orchestrator.api import access
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.server import make_server
from orc.orchestrator.service.settings import Settings


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("served")
    clusters = home / "clusters.yaml"
    clusters.write_text("local: {run_as: service}\nours: {kind: local}\n")
    made = Served(home / "state", clusters)
    made.state_dir.mkdir(mode=0o700)
    with made.ledger() as client:
        for user, role in (("ada", "admin"), ("grace", "user"), ("alan", "user"), ("eve", "viewer")):
            made.tokens[user] = access.create(client.workspace.ledger, user, role, client.workspace.clock())[0]
    settings = Settings(port=0, reconciler=False, requests_per_minute=1_000_000, max_upload=200_000)
    server = make_server(settings, create_app(settings, open_client=made.ledger))
    over = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    made.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def passes() -> None:
        with made.ledger() as client:
            while not over.wait(0.1):
                client.refresh()

    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    serving.start()
    while not server.started:
        assert serving.is_alive()
        time.sleep(0.01)
    driver = threading.Thread(target=passes)
    driver.start()
    yield made
    over.set()
    driver.join()
    with made.ledger() as client:
        client.cancel([row.id for row in client.jobs(states=["QUEUED", "PENDING", "RUNNING"])], grace_s=0)
    server.should_exit = True
    serving.join()


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., LoadedJob]:
    """Writes a job that runs *script* into a directory of its own, and loads it."""

    def write(script: str = "print('hello', flush=True)\n", **keys: Any) -> LoadedJob:
        directory = tmp_path / "project"
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text(script)
        job = {"name": "digits", "script": "train.py", "launcher": "python", "grace": 1, **keys}
        (directory / "job.yaml").write_text(yaml.safe_dump(job))
        return load_job(directory / "job.yaml")

    return write
