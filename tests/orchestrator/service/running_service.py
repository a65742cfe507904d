"""A service on a free port of this machine, over a ledger with jobs and a backend whose logs are files of the test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fake_backend import FakeBackend
from fastapi import FastAPI
from prepared_jobs import create_prepared

from orc.launchers.backends.base import Handle, LogSelector
from orc.orchestrator.api import access
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.context import Service
from orc.orchestrator.service.server import Server, make_server, run_server
from orc.orchestrator.service.settings import Settings


class LoggingBackend(FakeBackend):
    """A fake whose logs are files on this machine, ``rank-0.log`` of the job's directory."""

    def log_file(self, handle: Handle, selector: LogSelector) -> str | None:
        name = "launcher" if selector.launcher else f"rank-{selector.rank}" if selector.node is None else "node"
        return str(self.root / f"{handle.marker}.{name}.log")


@dataclass
class Running:
    """A service that runs in a thread of this process."""

    state_dir: Path
    settings: Settings
    url: str = ""
    tokens: dict[str, str] = field(default_factory=dict)  # by user
    server: Server | None = None
    service: Service | None = None
    thread: threading.Thread | None = None
    prepare: Callable[[FastAPI], None] = lambda app: None  # before it starts

    @property
    def backend(self) -> LoggingBackend:
        return LoggingBackend(self.state_dir / "fake")

    def open_client(self) -> Client:
        return Client(self.state_dir, backend_of=lambda _: self.backend)

    def start(self) -> Running:
        app = create_app(self.settings, open_client=self.open_client)
        self.prepare(app)
        self.service, self.server = app.state.service, make_server(self.settings, app)
        ready = threading.Event()

        def listening(url: str) -> None:
            self.url = url
            ready.set()

        run = run_server(self.server, self.settings, listening)
        self.thread = threading.Thread(target=asyncio.run, args=(run,), daemon=True)
        self.thread.start()
        assert ready.wait(60)
        return self

    def stop(self) -> None:
        assert self.server is not None
        assert self.thread is not None
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def http(self, user: str | None = "ada", **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.tokens[user]}"} if user else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def token(self, user: str, role: str, **options: Any) -> tuple[str, str]:
        with self.open_client() as client:
            text, record = access.create(client.workspace.ledger, user, role, client.workspace.clock(), **options)
        return text, record.id

    def add_job(self, job_id: str, owner: str = "grace", *, running: bool = True) -> str:
        """Write a job into the ledger, at its backend when it is *running*; return its marker."""
        spec = {"name": job_id, "grace": 30.0, "cluster": "local", "script": "train.py"}
        digests = {"code": "0" * 64, "runtime": "1" * 64}
        job = NewJob(
            job_id,
            job_id,
            "local",
            "fake",
            "job.yaml",
            spec,
            digests,
            {"team": "a"},
            owner=owner,
        )
        marker = f"orc-{job_id}-a1"
        with self.open_client() as client, client.workspace.ledger.transaction() as tx:
            if not running:
                tx.enqueue(job, "there is no room")
                return marker
            record = create_prepared(tx, job, marker, "plan", "test", 0.0)
            record = tx.record(record, Event(Kind.SUBMITTING, 1))
            self.backend._start(marker, {})
            handle = self.backend._handle(marker).to_dict()
            tx.record(record, Event(Kind.ACCEPTED, 1), attempt_set={"handle": handle, "submitted_at": 1.0})
        return marker

    def end_job(self, job_id: str) -> None:
        """Let the ledger know that the job has succeeded."""
        with self.open_client() as client, client.workspace.ledger.transaction() as tx:
            record = tx.find(job_id)
            assert record is not None
            tx.record(record, Event(Kind.SUCCEEDED, 1), Event(Kind.JOB_SUCCEEDED))

    def log(self, marker: str, name: str = "rank-0") -> Path:
        return self.state_dir / "fake" / f"{marker}.{name}.log"


def make_running(state_dir: Path, **settings: Any) -> Running:
    """A service that is not started yet, with a token for ada (admin), grace and alan (users), eve (viewer)."""
    state_dir.mkdir(mode=0o700)
    (state_dir / "fake").mkdir()
    made = Running(state_dir, Settings(**{"port": 0, "reconciler": False, "poll_interval": 0.05, **settings}))
    for user, role in (("ada", "admin"), ("grace", "user"), ("alan", "user"), ("eve", "viewer")):
        made.tokens[user] = made.token(user, role)[0]
    return made


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Events of a stream: id (a number), event, data; comments and retry hints as {"comment"} and {"retry"}."""
    event: dict[str, Any] = {}
    for line in lines:
        if not line:
            if event:
                yield event
            event = {}
            continue
        name, _, value = line.partition(": " if not line.startswith(":") else ":")
        if not name:
            event["comment"] = value.strip()
        elif name == "data":
            event["data"] = json.loads(value)
        else:
            event[name] = int(value) if name in ("id", "retry") else value
