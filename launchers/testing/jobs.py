"""Jobs on their way through a backend under test."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from orc.launchers.agent.procfs import marked_processes
from orc.launchers.backends.base import Backend, Handle, LogSelector, Observation, SupportsProvisioning
from orc.launchers.plan import Plan

# Where the attempts of a backend are, as a test sees them: from the plan and the path over there to paths here, one for
# each machine that has a copy.
View = Callable[[Plan, PurePosixPath], Sequence[Path]]

_LONGEST_REST_S = 2.0


def polls(timeout_s: float, every_s: float = 0.05) -> Iterator[None]:
    """Yield for each look, until *timeout_s* have passed.

    After a look comes a rest of three times its length: most of a busy machine is left to what the test waits for.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(min(max(every_s, 3 * (time.monotonic() - began)), _LONGEST_REST_S))


SUBMIT = """
import os, pickle, signal, sys
kind, cluster, plan, secrets, then_die = pickle.load(sys.stdin.buffer)
kind(cluster).submit(plan, secrets)
if then_die:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass
class Job:
    """A job on its way through a backend."""

    backend: Backend
    plan: Plan
    view: View
    secrets: Mapping[str, str] = field(default_factory=dict)
    handle: Handle = field(init=False)  # once it is submitted

    @property
    def _config(self) -> dict[str, Any]:
        return dict(json.loads(next(f.content for f in self.plan.files if f.path.endswith("agent.json"))))

    @property
    def directory(self) -> PurePosixPath:
        """The attempt's directory, as the job sees it."""
        return PurePosixPath(self._config["attempt_dir"])

    @property
    def work(self) -> PurePosixPath:
        """The working directory of its ranks."""
        return PurePosixPath(self._config.get("work_dir") or self.directory.parent / "work")

    @property
    def directories(self) -> Sequence[Path]:
        """Return `directory` as this test sees it: one for each machine that does not share it."""
        return self.view(self.plan, self.directory)

    def read(self, name: str) -> bytes:
        """Return the content of the file *name* in the directory of the job, over all machines."""
        return b"".join((directory.parent / name).read_bytes() for directory in self.directories)

    def go(self) -> None:
        """Make the file ``go`` in the job's directory, for which its script waits."""
        for directory in self.directories:
            (directory.parent / "go").touch()

    def submit(self) -> Job:
        self.handle = self.backend.submit(self.plan, self.secrets)
        return self

    def submit_from_another_process(self, *, then_die: bool = False) -> subprocess.Popen[bytes]:
        """Submit in a process of its own, which may be killed as soon as that has worked."""
        cluster = self.backend.cluster
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen([sys.executable, "-c", SUBMIT], stdin=subprocess.PIPE, env=env)
        assert process.stdin is not None
        with process.stdin:
            pickle.dump((type(self.backend), cluster, self.plan, dict(self.secrets), then_die), process.stdin)
        return process

    def poll(self) -> Observation:
        seen = self.backend.poll([self.handle])[self.handle]
        if seen.due and isinstance(self.backend, SupportsProvisioning):
            return self.backend.advance(self.handle, self.plan, self.secrets)
        return seen

    def until(self, done: Callable[[Observation], bool], timeout_s: float = 150.0) -> Observation:
        for _ in polls(timeout_s):
            if done(seen := self.poll()):
                return seen
        raise AssertionError(f"still {seen}; logs: {self.all_logs()}")

    def wait(self, timeout_s: float = 150.0) -> Observation:
        """The last observation; by then nothing of the job may be running any more."""
        seen = self.until(lambda o: o.phase.ended, timeout_s)
        for _ in polls(60, 0.02):
            if not (left := marked_processes(str(self.directory))):
                return seen
        raise AssertionError(f"still running: {left}")

    def cancel(self, grace_s: float) -> None:
        self.backend.cancel([self.handle], timedelta(seconds=grace_s))

    def log(self, rank: int | None = None, node: int | None = None, offset: int = 0) -> str:
        chunks = self.backend.logs(self.handle, LogSelector(rank=rank, node=node), offset)
        return b"".join(chunk.data for chunk in chunks).decode()

    def until_log(self, rank: int, text: str, timeout_s: float = 150.0) -> None:
        self.until(lambda _: text in self.log(rank), timeout_s)

    def all_logs(self) -> dict[str, str]:
        return {str(s): self.log(s.rank, s.node) for s in self.backend.log_selectors(self.handle)}


class MakeJob(Protocol):
    """``make_job(source, nodes=1, procs=1, launcher="python", ...)``: rendered and staged, not yet submitted."""

    def __call__(self, source: str, /, **options: Any) -> Job:
        """Return the job of the program *source*; what is no option of the fixture is a key of the job file."""
        ...


class RunJob(Protocol):
    """``run(source, ...)``: as `MakeJob`, submitted and waited for."""

    def __call__(self, source: str, /, **options: Any) -> tuple[Job, Observation]:
        """Return the job, and what it was like at its end."""
        ...
