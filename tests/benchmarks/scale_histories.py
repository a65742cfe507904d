"""Part of bench_scale.py: random histories of jobs against a model, some of them of real processes that are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from harness import Row

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "orchestrator"), str(TESTS / "orchestrator/engine")]

import hypothesis  # noqa: E402
import test_exactly_once as lives  # noqa: E402
from fake_backend import FakeBackend  # noqa: E402

from orc.launchers.backends.base import Phase  # noqa: E402
from orc.orchestrator.client import Client  # noqa: E402
from orc.orchestrator.engine.submission import new_submission, submit  # noqa: E402
from orc.orchestrator.ledger.lifecycle import Event, Kind, fold  # noqa: E402

STEPS = 50
PER_SEED = 20  # histories


def model(full: bool, database: str, ledgers: Callable[[Path], Any]) -> Iterator[tuple[int, int]]:
    """Lead lives on each kind of cluster, printing each seed; yields numbers of histories and of failures."""
    for habits in lives.KINDS:
        for seed in range(5) if full else range(1):
            kind, counted = lives.kind_of_lives(habits, ledgers)
            count = PER_SEED if full else 2
            failed = 0
            try:
                lives.lead(hypothesis.seed(seed)(kind), count, STEPS, database=None)
            except Exception:
                failed = 1
                traceback.print_exc()
            processes = sum(number for what, number in counted.items() if what.startswith("process "))
            killed = sum(number for what, number in counted.items() if what.startswith("killed "))
            events = sum(number for what, number in counted.items() if what.startswith("event "))
            print(
                f"{database} {habits.kind} seed {seed}: {counted['lives']} histories, {counted['steps']} steps, "
                f"{processes} processes, {killed} killed, {events} events: {'FAILED' if failed else 'held'}",
                flush=True,
            )
            yield counted["lives"], failed


class RealProcesses:
    """One history of jobs whose submissions, passes and cancellations are processes of this machine."""

    def __init__(self, seed: int, root: Path) -> None:
        self.chance, self.root = random.Random(seed), root
        self.spec, self.snapshot, self.store = lives._ingredients()
        retry = self.spec.retry.model_copy(update={"backoff": 0.0})
        self.spec = self.spec.model_copy(update={"retry": retry})
        self.backend = FakeBackend(root / "fake")
        self.backend.self_driving = False
        self.known: set[str] = set()
        self.killed = self.processes = 0
        self.took_s = 0.05

    def client(self) -> Client:
        client = Client(self.root / "state", backend_of=lambda _: self.backend, reconciler=False)
        client.workspace.store = self.store
        return client

    def process(self, work: Callable[[Client], Any], *, kill: bool) -> None:
        """Run *work* in a process; with *kill*, that is killed at some moment."""
        self.processes += 1
        began = time.monotonic()
        if not (child := os.fork()):
            with contextlib.suppress(BaseException), self.client() as client:
                work(client)
            os._exit(0)
        if kill:
            time.sleep(self.chance.uniform(0.0, 1.1 * self.took_s))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            self.killed += 1
        elif not kill:
            self.took_s = 0.7 * self.took_s + 0.3 * (time.monotonic() - began)

    def submit(self, client: Client) -> None:
        submit(client.workspace, [new_submission(client.workspace, self.spec, self.snapshot, source="",
                                                 secrets=lives.SECRET)])  # fmt: skip

    def step(self) -> None:
        what = self.chance.choice(["submit", "pass", "pass", "cancel", "truth", "truth", "trouble"])
        kill = self.chance.random() < 0.5
        if what == "submit" and len(self.known) < 4:
            self.process(self.submit, kill=kill)
        elif what == "cancel" and self.known and self.chance.random() < 0.3:
            job = self.chance.choice(sorted(self.known))
            self.process(lambda client: client.cancel([job]), kill=kill)
        elif what == "truth":
            self.change(self.chance.choice([(Phase.RUNNING, None), *lives.ENDS]))
        elif what == "trouble":
            call = self.chance.choice(["submit", "poll", "find", "cancel"])
            trouble = {"submit": [None, "unreachable", "ambiguous", "swallowed"]}.get(call, [None, "unreachable"])
            self.backend.behave(**{call: self.chance.choice(trouble)})
        else:
            self.process(lambda client: client.refresh(), kill=kill)
        self.check()

    def change(self, to: tuple[Phase, Any]) -> None:
        alive = [marker for marker in self.backend.calls("run") if not self.backend._observe(marker).phase.ended]
        if alive:
            cause = {} if to[1] is None else {"cause": to[1]}
            self.backend.set(self.chance.choice(alive), to[0], **cause)

    def check(self) -> None:
        with self.client() as client:
            ledger = client.workspace.ledger
            now = {row.id for row in client.jobs(limit=None)}
            assert self.known <= now, f"lost: {self.known - now}"
            self.known = now
            for job in ledger.jobs(sorted(now)):
                told = fold(Event(Kind(e.kind), e.attempt, e.data) for e in ledger.events(job.id))
                assert told.job == job.state
                for attempt in ledger.attempts(job.id):
                    assert told.attempts[attempt.number] == attempt.state
                    if attempt.state in ("SUCCEEDED", "RUNNING"):
                        seen = self.backend._observe(attempt.marker).phase
                        assert attempt.state == "RUNNING" or seen is Phase.SUCCEEDED, (attempt, seen)
        ran = self.backend.calls("run")
        assert len(ran) == len(set(ran)), "an attempt has run twice"
        alive = Counter(m.rpartition("-a")[0] for m in ran if not self.backend._observe(m).phase.ended)
        assert not alive or max(alive.values()) == 1, f"two attempts of one job: {alive}"

    def end(self) -> None:
        self.backend.behave(submit=None, poll=None, find=None, cancel=None)
        for _ in range(40):
            with self.client() as client:
                client.refresh()
                if not client.workspace.ledger.active():
                    break
            for marker in self.backend.calls("run"):
                if not self.backend._observe(marker).phase.ended:
                    self.backend.set(marker, Phase.SUCCEEDED)
        else:
            raise AssertionError("some jobs never end")
        self.check()


def real(full: bool, database: str, ledgers: Callable[[Path], Any]) -> Iterator[tuple[int, int]]:
    """Histories of processes that are killed; a line for twenty of them."""
    for first in range(0, 100 if full else 4, PER_SEED):
        failed = killed = processes = count = jobs = 0
        for seed in range(first, first + (PER_SEED if full else 4)):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                root = Path(directory)
                (root / "state").mkdir(mode=0o700)
                with ledgers(root / "state") as url, mock.patch.dict(os.environ, {"ORC_LEDGER_URL": url}):
                    history = RealProcesses(seed, root)
                    try:
                        for _ in range(STEPS):
                            history.step()
                        history.end()
                    except AssertionError:
                        failed += 1
                        print(f"{database} processes seed {seed} failed:", flush=True)
                        traceback.print_exc()
            count, killed = count + 1, killed + history.killed
            processes, jobs = processes + history.processes, jobs + len(history.known)
        print(
            f"{database} real processes, seeds {first} to {first + count - 1}: {count} histories, "
            f"{count * STEPS} steps, {jobs} jobs, {processes} processes, {killed} killed by SIGKILL: {failed} FAILED",
            flush=True,
        )
        yield count, failed


def histories(full: bool, ledgers: dict[str, Callable[[Path], Any]]) -> Iterable[Row]:
    """Random histories on each database: with ``full`` a thousand of the model, two hundred of real processes."""
    os.environ["ORC_RECONCILER"] = "off"
    for what in (model, real):
        for database, made in ledgers.items():
            found = list(what(full, database, made))
            count, failed = sum(one for one, _ in found), sum(one for _, one in found)
            name = "real processes" if what is real else "the model"
            yield Row(f"{database}: histories of {name}", "none", count, None, "", None, None)
            yield Row(f"{database}: of those that broke a promise", "none", failed, None, "", None, 0, "ours")
