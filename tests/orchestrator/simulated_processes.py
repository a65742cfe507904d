"""Processes of orc as greenlets: each stops before every step that another process could see, goes on when a test says
so, and can be killed there as by SIGKILL: nothing that it would have cleaned up is cleaned up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import greenlet

from orc.launchers.errors import LaunchError
from orc.orchestrator.client import Client
from orc.orchestrator.ledger import leases
from orc.orchestrator.ledger.database import Connection, Database


class Killed(BaseException):
    """SIGKILL: whoever catches it finds that nothing works any more."""


class Process:
    """One process on a machine, with the client that it uses."""

    def __init__(self, machine: Machine, what: str, work: Callable[[Client], Any]) -> None:
        self.machine, self.what = machine, what
        self.owner = f"{machine.name}/{what}/{next(machine.numbers)}"
        self.at = "begin"
        self.announced_at = 0.0  # true time at which the ledger last said that it is about to send something
        self.dead = False
        self.error: BaseException | None = None
        self.result: Any = None
        self._work = work
        self._main = greenlet.getcurrent()
        self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.process = self  # type: ignore[attr-defined]
        self.client = machine.take_client(self)

    def __repr__(self) -> str:
        return f"<{self.owner} at {self.at}>"

    @property
    def over(self) -> bool:
        return self._greenlet.dead

    def _run(self) -> None:
        try:
            self.result = self._work(self.client)
        except (Killed, LaunchError, KeyError) as error:
            self.error = error
        finally:
            self.machine.give_client(self)

    def pause(self, at: str) -> None:
        if self.dead:
            raise Killed
        self.at = at
        if at == "submitting":
            self.announced_at = self.machine.true_time()
        self._main.switch()
        if self.dead:
            raise Killed

    def go(self, until: Callable[[int, str], bool] = lambda steps, at: False) -> None:
        """Go on, until *until* says of the steps taken and of the place that it is far enough; or to the end."""
        steps = 0
        self._main = greenlet.getcurrent()
        while not self.over:
            self._greenlet.switch()
            steps += 1
            if until(steps, self.at):
                return

    def kill(self) -> None:
        self.dead = True
        self.client.workspace.state_dir = self.machine.nowhere
        self._main = greenlet.getcurrent()
        if not self.over:
            self._greenlet.switch()
        assert self.over


def announced_at(otherwise: float) -> float:
    """Return the true time at which the process that calls this has announced what it sends."""
    process = getattr(greenlet.getcurrent(), "process", None)
    return process.announced_at if process is not None else otherwise


def pause(at: str) -> None:
    """Stop the process that calls this; nothing where a test itself does."""
    process = getattr(greenlet.getcurrent(), "process", None)
    if process is not None:
        process.pause(at)


class WatchedDatabase:
    """The database of one process. *written* is called after every commit."""

    def __init__(self, database: Database, written: Callable[[], None]) -> None:
        self._database, self._written = database, written
        self.url = database.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        pause("read")
        with self._database.read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        pause("write")
        with self._database.write() as connection:
            yield connection
        self._written()


class Machine:
    """A machine with its own state directory, whose clock may be wrong, on which processes run."""

    def __init__(
        self,
        name: str,
        root: Path,
        clock: Callable[[], float],
        backend_of: Callable[[Callable[[str], None]], Any],
        prepare: Callable[[Client], None],
        written: Callable[[], None],
    ) -> None:
        self.name = name
        self.state_dir = root / name
        self.state_dir.mkdir(mode=0o700)
        self.nowhere = root / "nowhere"  # where a process writes that is dead
        self.skew = 0.0
        self.true_time: Callable[[], float] = time.time
        self.pass_time: Callable[[float], None] = lambda _: None  # while a process sleeps
        self.numbers = iter(range(1_000_000))
        self.dead_owners: set[str] = set()
        self._clock, self._backend_of, self._prepare, self._written = clock, backend_of, prepare, written
        self._idle: list[Client] = []
        self._all: list[Client] = []

    def clock(self) -> float:
        return self._clock() + self.skew

    def _sleep(self, seconds: float) -> None:
        pause("sleep")
        self.pass_time(seconds)

    def new_client(self) -> Client:
        client = Client(
            self.state_dir, backend_of=lambda _: self._backend_of(pause), clock=self.clock, sleep=self._sleep
        )
        ledger = client.workspace.ledger
        if ledger.database.url.startswith("sqlite"):
            ledger.database._raw.execute("PRAGMA synchronous = OFF")  # type: ignore[attr-defined]
        ledger.database = WatchedDatabase(ledger.database, self._written)
        self._prepare(client)
        self._all.append(client)
        return client

    def take_client(self, process: Process) -> Client:
        # Who found the disk full, or not any more, has opened the ledger by itself.
        fit = [one for one in self._idle if isinstance(one.workspace.ledger.database, WatchedDatabase)]
        self._idle = [one for one in fit if not one.workspace.ledger.volatile]
        client = self._idle.pop() if self._idle else self.new_client()
        client.workspace.owner = process.owner
        client.workspace.state_dir = self.state_dir
        client.workspace.noted.clear()
        client.workspace._backends.clear()  # it reads clusters.yaml as that is now
        return client

    def give_client(self, process: Process) -> None:
        self.dead_owners.add(process.owner)
        self._idle.append(process.client)

    def close(self) -> None:
        for client in self._all:
            client.close()


def owner_is_gone(machines: dict[str, Machine]) -> Callable[[str], bool]:
    """Return the check of whether an owner has ended, which a process can make on its own machine only."""

    def is_gone(owner: str) -> bool:
        process = getattr(greenlet.getcurrent(), "process", None)
        here = process.machine.name if process is not None else ""
        name = owner.partition("/")[0]
        return name == here and owner in machines[name].dead_owners

    return is_gone


@contextmanager
def simulated(machines: dict[str, Machine], ledger_url: str, new_job_id: Callable[[str], str]) -> Iterator[None]:
    """Make fault points pauses, owners those of simulated processes, and ids the same in every run."""
    replaced = {"fault_point": pause, "new_job_id": new_job_id}
    with ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("orc.orchestrator")]:
            for attribute, replacement in replaced.items():
                if attribute in vars(module):
                    stack.enter_context(mock.patch.object(module, attribute, replacement))
        stack.enter_context(mock.patch.object(leases, "owner_is_gone", owner_is_gone(machines)))
        stack.enter_context(mock.patch.dict("os.environ", {"ORC_LEDGER_URL": ledger_url}))
        yield
