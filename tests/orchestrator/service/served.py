"""A service in a process of its own, which a test may kill: over a ledger on disk and the fake backend of files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from fake_backend import FakeBackend

from orc.orchestrator.api import access
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.records import NewJob

FAKES = Path(__file__).parents[1]
SERVE = """
import json, sys
from pathlib import Path
from fake_backend import FakeBackend
from running_service import LoggingBackend
from orc.orchestrator.client import Client
from orc.orchestrator.service.server import serve
from orc.orchestrator.service.settings import Settings
from orc.orchestrator.service.api import events
events.PING_S = json.loads(sys.argv[5])
state = Path(sys.argv[1])
hosts = json.loads(sys.argv[3])
backend = FakeBackend(state / "fake", hosts=hosts) if hosts else LoggingBackend(state / "fake")
backend.cluster = backend.cluster.model_copy(update=json.loads(sys.argv[4]))
def open_client():
    return Client(state, backend_of=lambda _: backend, reconciler=False)
serve(Settings(**json.loads(sys.argv[2])), open_client, lambda url: print(url, flush=True))
"""


@dataclass
class Served:
    """A service that can be started, killed and started again."""

    state_dir: Path
    settings: dict[str, Any]
    tokens: dict[str, str] = field(default_factory=dict)  # by user
    url: str = ""
    process: subprocess.Popen[str] | None = None
    hosts: dict[str, int] = field(default_factory=dict)  # slots by name, where orc places the jobs
    described: dict[str, Any] = field(default_factory=dict)  # of the cluster in clusters.yaml
    ping_s: float = 1.0  # between two signs of life on a silent stream

    def open_client(self) -> Client:
        backend = FakeBackend(self.state_dir / "fake", hosts=self.hosts)
        return Client(self.state_dir, backend_of=lambda _: backend, reconciler=False)

    def start(self) -> Served:
        told = (self.settings, self.hosts, self.described, self.ping_s)
        path = os.pathsep.join([str(FAKES), str(FAKES / "service"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.state_dir), *map(json.dumps, told)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url
        return self

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def memory(self) -> int:
        """Return the bytes that the service has in memory."""
        assert self.process is not None
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def http(self, user: str | None = "grace", **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.tokens[user]}"} if user else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def add_job(self, job_id: str, **columns: Any) -> None:
        """Write a job into the ledger that waits for ever."""
        spec = {"name": job_id, "grace": 30.0, "cluster": "local", "script": "train.py"}
        values = {"name": job_id, "owner": "grace", "tags": {}, **columns}
        job = NewJob(id=job_id, cluster="local", backend="fake", source="", spec=spec, digests={}, **values)
        with self.open_client() as client, client.workspace.ledger.transaction() as tx:
            tx.enqueue(job, "there is no room")


def make_served(state_dir: Path, users: Mapping[str, str] | None = None, **settings: Any) -> Served:
    """Return a service that is not started yet, with tokens of ada (admin), grace and alan (users), eve (viewer).

    *users* are names of further tokens, and the users whose they are.
    """
    state_dir.mkdir(mode=0o700)
    made = Served(state_dir, {"port": 0, "reconciler": False, **settings})
    with made.open_client() as client:
        for user, role in (("ada", "admin"), ("grace", "user"), ("alan", "user"), ("eve", "viewer")):
            made.tokens[user] = access.create(client.workspace.ledger, user, role, client.workspace.clock())[0]
        for name, user in (users or {}).items():
            made.tokens[name] = access.create(client.workspace.ledger, user, "user", client.workspace.clock())[0]
    return made
