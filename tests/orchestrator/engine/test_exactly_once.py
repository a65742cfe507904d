"""Lives of jobs on a cluster whose truth is known: never two running attempts of a job, never a lost job, never a
status that was not true.

Submissions, passes and cancellations are processes on two machines with one ledger. They go on step by step, in any
order; each may be killed between any two steps; the cluster loses messages, hides what it has, refuses, breaks,
requeues and preempts; clocks jump; disks fill; clusters.yaml changes. What must hold is checked after every commit of
the ledger, which is a file or in PostgreSQL.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from fake_backend import FakeBackend
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Phases
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_cluster import ALIVE, LOCAL, SAGEMAKER, SLURM, SSH, TPU, Habits, Run, SimulatedCluster, World
from simulated_processes import Killed, Machine, Process, pause, simulated

from orc.launchers.backends.base import Cause, Phase, Snapshot
from orc.launchers.errors import LaunchError
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.spec import JobSpec, load_job
from orc.orchestrator.client import Client
from orc.orchestrator.engine import orphans, steps
from orc.orchestrator.engine.admission import is_met
from orc.orchestrator.engine.job_source import take
from orc.orchestrator.engine.submission import Submission, submit, submit_group
from orc.orchestrator.ledger import database, groups
from orc.orchestrator.ledger.groups import GroupRecord
from orc.orchestrator.ledger.lifecycle import Event, Kind, fold

JOB = """\
name: j
command: 'true'
launcher: python
secrets: [TOKEN]
retry: {max_attempts: 3, on: [crash, preempted, node_failure], backoff: 5}
"""
SECRET = {"TOKEN": "hunter2-hunter2"}
TROUBLE = {
    "submit": [None, None, "refuse", "unreachable", "ambiguous", "swallowed", "late", "overdue", "bug"],
    "poll": [None, None, "unreachable", "bug", "unknown", "partly"],
    "find": [None, None, "unreachable"],
    "stage": [None, None, "unreachable"],
    "cancel": [None, None, "unreachable", "partly", "lost"],
    "advance": [None, "unreachable", "bug"],
}
ENDS = [
    (Phase.SUCCEEDED, None),
    (Phase.FAILED, Cause.CRASH),
    (Phase.FAILED, Cause.PREEMPTED),
    (Phase.FAILED, Cause.NODE_FAILURE),
    (Phase.LOST, Cause.NODE_FAILURE),
]
DESCRIPTIONS: list[dict[str, Any]] = [
    {},
    {"run_as": {"ann": "a1"}},
    {"run_as": {"ann": "a1"}, "root": "/new"},
    {"run_as": {"ann": {"user": "a2", "root": "/own"}}},
    {"root": "/new"},
    {"run_as": {"eve": "e1"}},  # an account that ann has not
]
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


@functools.cache
def _ingredients() -> tuple[JobSpec, Snapshot, ContentStore]:
    directory = Path(tempfile.mkdtemp(prefix="orc-lives-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "project").mkdir()
    (directory / "project" / "job.yaml").write_text(JOB)
    loaded = load_job(directory / "project" / "job.yaml")
    store = ContentStore(directory / "store")
    return loaded.spec, take(store, loaded, lambda *_: None, FakeBackend(directory / "cluster")), store


Ledgers = Callable[[Path], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def in_a_file(directory: Path) -> Iterator[str]:
    yield f"sqlite:///{directory / 'ledger.db'}"


class Lives(RuleBasedStateMachine):
    habits: ClassVar[Habits]
    counted: ClassVar[Counter[str]]
    ledgers: ClassVar[Ledgers] = staticmethod(in_a_file)
    most_jobs = 3

    def __init__(self) -> None:
        super().__init__()
        self.context = contextlib.ExitStack()
        root = Path(self.context.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        self.world = World(self.habits)
        self.offset = 0.0  # of the wall clocks from the true time
        self.processes: list[Process] = []
        self.ids: list[str] = []
        self.ended_as: list[str] = []
        self.checked: dict[str, int] = {}  # by job: the revision that was compared with the truth
        self.spec, self.snapshot, store = _ingredients()

        def prepare(client: Client) -> None:
            client.workspace.store = store
            client.workspace.user = "ann"
            client.workspace.backend_for = lambda cluster: SimulatedCluster(self.world, pause, cluster)

        def backend_of(pause: Any) -> SimulatedCluster:
            return SimulatedCluster(self.world, pause)

        def clock() -> float:
            return self.world.now + self.offset

        self.machines = {
            name: Machine(name, root, clock, backend_of, prepare, self.check_what_is_new) for name in ("here", "there")
        }
        (root / "state").mkdir(mode=0o700)
        url = self.context.enter_context(type(self).ledgers(root / "state"))
        self.is_file = url.startswith("sqlite")
        self.context.enter_context(simulated(self.machines, url, self.new_job_id))
        self.disk_is_full = False
        free = lambda _: 0 if self.disk_is_full else 1 << 40  # noqa: E731
        self.context.enter_context(mock.patch.object(database, "_free", free))
        self.counted["lives"] += 1
        for machine in self.machines.values():
            machine.pass_time = self.world.pass_time
            machine.true_time = lambda: self.world.now
            self.context.callback(machine.close)
        self.observer = self.machines["here"].new_client()
        self.observer.workspace.ledger.database = self.observer.workspace.ledger.database._database

    def new_job_id(self, name: str) -> str:
        self.made = getattr(self, "made", 0) + 1
        return f"{name}-{self.made:06d}"

    # -- what happens

    def begin(self, machine: str, what: str, work: Any) -> Process:
        process = Process(self.machines[machine], what, work)
        self.processes.append(process)
        self.counted[f"process {what}"] += 1
        return process

    @initialize(data=st.data())
    def first(self, data: Any) -> None:
        self.submit(data, "here")

    @precondition(lambda self: len(self.ids) < self.most_jobs and len(self.processes) < 4)
    @rule(data=st.data(), machine=st.sampled_from(["here", "here", "there"]))
    def submit(self, data: Any, machine: str) -> None:
        self.world.now += 0.001  # no two jobs are of the same age
        spec = self.spec
        if self.habits.hosts:
            nodes, slots = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), ("2:3", 1), (3, 1)]))
            resources = spec.resources.model_copy(update={"nodes": nodes, "procs_per_node": slots})
            spec = spec.model_copy(update={"resources": resources})
        wishes: dict[str, Any] = {"priority": data.draw(st.sampled_from([0, 0, 5]))}
        wishes["deadline"] = data.draw(st.sampled_from([None, None, None, 300.0]))
        if self.ids and data.draw(st.sampled_from([False, False, True])):
            condition = data.draw(st.sampled_from(["success", "any", "failure"]))
            wishes["depends_on"] = [f"{data.draw(st.sampled_from(self.ids))}:{condition}"]
        spec = spec.model_copy(update=wishes)
        if self.habits.arrays and not spec.depends_on and data.draw(st.booleans()):
            work = self.array_of(spec, data.draw(st.sampled_from([None, 1])))
            self.begin(machine, "array", work)
        else:
            self.begin(machine, "submit", self.submission_of(spec))
        self.go_on(data)

    def submission_of(self, spec: JobSpec) -> Callable[[Client], list[str]]:
        return lambda client: submit(client.workspace, [self.new_submission(spec)])

    def array_of(self, spec: JobSpec, max_parallel: int | None = None) -> Callable[[Client], list[str]]:
        name = self.new_job_id("array")
        group = GroupRecord(name, "array", name, "ann", self.world.now, max_parallel)

        def work(client: Client) -> list[str]:
            new = [replace(self.new_submission(spec), group=group.id, number=number) for number in range(2)]
            return submit_group(client.workspace, new, group)

        return work

    def new_submission(self, spec: JobSpec) -> Submission:
        return Submission(spec, self.snapshot, "ann", self.new_job_id(spec.name), secrets=SECRET)

    @precondition(lambda self: len(self.processes) < 4)
    @rule(
        data=st.data(),
        machine=st.sampled_from(["here", "here", "there"]),
        patience_s=st.sampled_from([0.0, 0.0, 15.0]),
    )
    def reconcile(self, data: Any, machine: str, patience_s: float) -> None:
        self.begin(machine, "pass", lambda client: client.refresh(patience_s=patience_s))
        self.go_on(data)

    @precondition(lambda self: self.ids and len(self.processes) < 4)
    @rule(data=st.data(), machine=st.sampled_from(["here", "there"]))
    def cancel(self, data: Any, machine: str) -> None:
        job = data.draw(st.sampled_from(self.ids))
        self.begin(machine, "cancel", lambda client: client.cancel([job]))
        self.go_on(data)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def go_on(self, data: Any) -> None:
        """A process goes on, to its end, for some steps, or to the next step of some kind."""
        process = data.draw(st.sampled_from(self.processes))
        far = data.draw(st.sampled_from(["end", "end", 1, 3, 10, "submit", "find", "cancel", "poll", "point"]))
        points = (*steps.FAULT_POINTS, *steps.PASS_POINTS)
        if far == "end":
            process.go()
        elif isinstance(far, int):
            process.go(lambda steps, at: steps >= far)
        else:
            process.go(lambda steps, at: at.startswith(far) or (far == "point" and at in points))
        self.reap(process)

    @precondition(lambda self: any(process.at != "begin" for process in self.processes))
    @rule(data=st.data())
    def kill(self, data: Any) -> None:
        process = data.draw(st.sampled_from([process for process in self.processes if process.at != "begin"]))
        self.counted[f"killed at {process.at}"] += 1
        process.kill()
        self.reap(process)

    def reap(self, process: Process) -> None:
        if not process.over:
            return
        self.processes.remove(process)
        if process.what in ("submit", "array") and isinstance(process.error, LaunchError):
            # What the user was told: it has not started, and will not.
            self.counted["submissions refused"] += 1
        elif process.what in ("submit", "array") and process.result is not None:
            assert set(process.result) <= set(self.ids)
        elif process.what == "pass" and not isinstance(process.error, Killed):
            assert process.error is None, process.error

    @rule(data=st.data())
    def trouble(self, data: Any) -> None:
        what = data.draw(st.sampled_from([*sorted(TROUBLE), "slowness", "dead"]))
        if what == "slowness":
            self.world.slowness = data.draw(st.sampled_from([0.0, 0.5, 0.95]))
        elif what == "dead":
            self.world.trouble["dead"] = data.draw(st.sampled_from([(), (), ("n1",), ("n2", "n3")]))
        else:
            how = data.draw(st.sampled_from(TROUBLE[what] + ["busy"] * bool(self.habits.hosts and what == "submit")))
            self.world.trouble[what] = how

    @precondition(lambda self: self.is_file)
    @rule(full=st.booleans())
    def disk_fills(self, full: bool) -> None:
        """Or there is room again. Who opens the ledger on a full disk has a copy that is forgotten."""
        self.disk_is_full = full

    @rule(described=st.sampled_from(DESCRIPTIONS))
    def is_described_anew(self, described: dict[str, Any]) -> None:
        self.world.described = described

    @rule(seconds=st.sampled_from([1.0, 11.0, 40.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([-3600.0, -20.0, 3600.0]))
    def clocks_jump(self, seconds: float) -> None:
        # A cluster's window is counted by the clock: one that jumps ahead within it cuts it short.
        if seconds < 0 or self.world.is_quiet():
            self.offset = max(self.offset + seconds, -7200.0)

    @precondition(lambda self: self.world.arrived())
    @rule(data=st.data())
    def runs(self, data: Any) -> None:
        waiting = [run for run in self.world.arrived() if run.phase is Phase.PENDING and not run.steps]
        if waiting:
            run = data.draw(st.sampled_from(waiting))
            run.becomes(Phase.RUNNING)
            self.counted["truth: runs"] += 1

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), end=st.sampled_from(ENDS))
    def ends(self, data: Any, end: tuple[Phase, Cause | None]) -> None:
        run = data.draw(st.sampled_from(self.world.alive()))
        if run.phase is Phase.PENDING and end[0] is Phase.SUCCEEDED:
            run.becomes(Phase.RUNNING)
        run.becomes(*end)
        run.lost_at = self.world.now
        if end[1] is Cause.NODE_FAILURE:
            run.failed_hosts = run.hosts[:1]
        self.counted[f"truth: {end[1] or end[0]}"] += 1

    @precondition(lambda self: any(map(self.world.may_come_back, self.world.runs)))
    @rule(data=st.data())
    def comes_back(self, data: Any) -> None:
        """What was gone is there again, unless somebody had asked to end it and did not wait."""
        gone = [run for run in self.world.runs if self.world.may_come_back(run)]
        run = data.draw(st.sampled_from(gone))
        if not {a.marker: a for a in self.observer.workspace.ledger.attempts(run.job)}[run.marker].state.terminal:
            run.becomes(Phase.RUNNING)
            self.counted["truth: comes back"] += 1

    @precondition(lambda self: self.habits.requeues and self.world.alive())
    @rule(data=st.data())
    def is_requeued(self, data: Any) -> None:
        run = data.draw(st.sampled_from(self.world.alive()))
        run.restarts += 1
        run.becomes(Phase.PENDING)
        self.counted["truth: requeued"] += 1

    # -- what holds

    @invariant()
    def count(self) -> None:
        self.counted["steps"] += 1

    def check_what_is_new(self) -> None:
        """Called after every commit: all that the ledger says of jobs that have changed is, or was, true."""
        ledger = self.observer.workspace.ledger
        with ledger.database.read() as connection:
            revisions = dict(connection.tuples("SELECT id, revision FROM jobs ORDER BY created_at, id"))
        assert self.checked.keys() <= revisions.keys(), "a job is lost"
        self.ids = list(revisions)
        for job_id, revision in revisions.items():
            if self.checked.get(job_id) == revision:
                continue
            self.checked[job_id] = revision
            job, attempts = ledger.job(job_id), ledger.attempts(job_id)
            events = ledger.events(job_id)
            told = fold(Event(Kind(e.kind), e.attempt, e.data) for e in events)
            assert told.job == job.state
            assert told.attempts == {attempt.number: attempt.state for attempt in attempts}
            assert (job.state in TERMINAL) == (job.ended_at is not None)
            for attempt in attempts:
                ended_badly = attempt.state in ("FAILED", "PREEMPTED", "LOST", "CANCELLED")
                assert (attempt.cause is None) == (not ended_badly)
                assert self.is_true(attempt), (attempt, self.run_of(attempt))
            assert SECRET["TOKEN"] not in repr((job, attempts, events))
            if attempts:
                with ledger.database.read() as connection:
                    needs = groups.dependencies_of(connection, [job_id])
                assert all(is_met(one.condition, state) for one, state in needs), needs
            if events[-1].kind == Kind.CANCEL_REQUESTED and events[-1].data.get("reason") == "deadline":
                assert job.deadline_at <= job.cancel_requested_at  # before the event, should a clock have jumped since
            self.counted[f"event {events[-1].kind}"] += 1

    def is_true(self, attempt: Any) -> bool:
        run = self.run_of(attempt)
        match attempt.state:
            case "PREPARED" | "SUBMITTING" | "AMBIGUOUS":
                return True
            case "PENDING":
                return run is not None and attempt.restarts <= run.restarts
            case "RUNNING":
                return run is not None and Phase.RUNNING in run.has_been and attempt.restarts <= run.restarts
            case "SUCCEEDED":
                return run is not None and run.phase is Phase.SUCCEEDED
            case "LOST":
                return run is not None and run.phase is Phase.LOST and self.is_over(run)
            case "PREEMPTED":
                return run is not None and (run.phase, run.cause) == (Phase.FAILED, Cause.PREEMPTED)
            case "FAILED" if attempt.cause == "launch":
                return all(run.is_overdue for run in self.world.runs if run.marker == attempt.marker)
            case "FAILED":
                return run is not None and (run.phase, run.cause) == (Phase.FAILED, attempt.cause)
            case "CANCELLED" if not attempt.handle:
                runs = [run for run in self.world.runs if run.marker == attempt.marker]
                return all(run.phase is Phase.CANCELLED or run.is_overdue for run in runs)
            case "CANCELLED":
                return run is not None and run.phase is Phase.CANCELLED
        raise AssertionError(attempt.state)

    def run_of(self, attempt: Any) -> Run | None:
        """Return the run that the ledger knows as this attempt."""
        if attempt.sent_to is None:
            return None
        hosts = (attempt.handle or {}).get("hosts", ())
        return self.world.find((attempt.sent_to.login, attempt.sent_to.root or ""), attempt.marker, hosts)

    def is_over(self, run: Run) -> bool:
        """True for a lost run that was waited for; what is to be cancelled need not be."""
        job = self.observer.workspace.ledger.job(run.job)
        return not self.world.may_come_back(run) or job.cancel_requested_at is not None

    @invariant()
    def never_two_attempts_of_a_job_at_once(self) -> None:
        jobs = Counter(run.job for run in self.world.alive() if not self.is_unexpected(run))
        assert not jobs or max(jobs.values()) == 1, jobs

    @invariant()
    def what_has_ended_runs_no_more(self) -> None:
        """But for a copy that came against its cluster's promise: that one is ended when it has been seen."""
        if self.processes:
            return
        ended = {job.id for job in self.observer.workspace.ledger.jobs(self.ids) if job.state.terminal}
        alive = [run for run in self.world.runs if run.job in ended and run.phase in ALIVE]
        assert not [run for run in alive if not self.is_unexpected(run)]

    def is_unexpected(self, run: Run) -> bool:
        """True for a copy that came after its attempt had been given up, or sent again to another place."""
        if not run.is_overdue:
            return False
        attempts = {attempt.marker: attempt for attempt in self.observer.workspace.ledger.attempts(run.job)}
        attempt = attempts[run.marker]
        return self.run_of(attempt) is not run if attempt.handle else attempt.state.terminal

    @invariant()
    def hosts_are_kept_for_what_may_use_them_and_never_twice(self) -> None:
        if not self.habits.hosts:
            return
        promised, used = Counter[str](), Counter[str]()
        held: dict[str, list[str]] = {}
        for reservation in sorted(self.observer.workspace.ledger.reservations(), key=lambda r: r.node):
            promised[reservation.host] += reservation.slots
            held.setdefault(reservation.marker, []).append(reservation.host)
        for run in self.world.alive():
            if not self.is_unexpected(run):  # a host whose slots are taken starts nothing
                used.update(dict.fromkeys(run.hosts, run.slots))
        for host, slots in self.habits.hosts.items():
            assert promised[host] <= slots
            assert used[host] <= slots
        for job_id in self.ids:
            for attempt in self.observer.workspace.ledger.attempts(job_id):
                hosts = held.pop(attempt.marker, None)
                if attempt.state in ("SUBMITTING", "AMBIGUOUS", "PENDING", "RUNNING"):
                    assert hosts == list(attempt.hosts)
                elif attempt.state != "PREPARED":
                    assert hosts is None
        assert not held

    def teardown(self) -> None:
        """With the trouble over, every job comes to an end that agrees with what happened on the cluster."""
        try:
            for process in list(self.processes):
                process.go()
                self.reap(process)
            self.come_to_an_end()
        finally:
            for process in self.processes:
                process.kill()
            self.context.close()

    def come_to_an_end(self) -> None:
        self.disk_is_full = False
        self.world.trouble.clear()
        self.world.slowness = 0.0
        for described in itertools.islice(itertools.cycle(reversed(DESCRIPTIONS[:-1])), 60):
            self.world.described = described  # every account is given back some time
            for machine in ("here", "there"):
                process = self.begin(machine, "pass", lambda client: client.refresh())
                process.go()
                self.reap(process)
            for run in self.world.alive():
                if not run.steps and not self.is_unexpected(run):
                    run.becomes(Phase.RUNNING)
                    run.becomes(Phase.SUCCEEDED)
            self.world.pass_time(700)
            self.never_two_attempts_of_a_job_at_once()
            ended = all(job.state.terminal for job in self.observer.workspace.ledger.jobs(self.ids))
            if ended and orphans.next_due(self.observer.workspace) is None:
                break
        assert not self.world.alive(), "nobody has ended a copy that came late"
        for machine in self.machines.values():
            for file in machine.state_dir.glob("job-secrets/*"):
                os.utime(file, (0, 0))
            process = self.begin(machine.name, "pass", lambda client: client.refresh())
            process.go()
            self.reap(process)
            assert not list(machine.state_dir.glob("job-secrets/*"))
        for job_id in self.ids:
            view = self.observer.job(job_id)
            assert view.ended, view
            self.ended_as.append(view.state)
            ran = [run for run in self.world.runs if run.job == job_id and not self.is_unexpected(run)]
            assert (view.state == "SUCCEEDED") == (Phase.SUCCEEDED in [run.phase for run in ran])
            assert len(ran) <= len(view.attempts)


def kind_of_lives(habits: Habits, ledgers: Ledgers = in_a_file) -> tuple[type[Lives], Counter[str]]:
    counted: Counter[str] = Counter()
    own = {"habits": habits, "counted": counted, "ledgers": staticmethod(ledgers)}
    return type(f"Lives_{habits.kind}", (Lives,), own), counted


def lead(lives: type[Lives], count: int, steps: int, **more: Any) -> None:
    """Lead so many lives of at most so many steps each; *more* are settings of hypothesis."""
    run_state_machine_as_test(
        lives,
        settings=settings(
            max_examples=count,
            stateful_step_count=steps,
            deadline=None,
            phases=[Phases.generate, Phases.shrink],
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


KINDS = [LOCAL, SSH, SLURM, SAGEMAKER, TPU]
each_kind = pytest.mark.parametrize("habits", KINDS, ids=lambda habits: habits.kind)
# `--hypothesis-profile=long` leads as many lives as that profile says, other ones each time.
LONG = settings.get_current_profile_name() == "long"


@each_kind
@pytest.mark.timeout(100_000 if LONG else 300)
def test_no_job_is_lost_or_runs_twice_and_no_status_is_untrue(habits: Habits, capsys: Any) -> None:
    lives, counted = kind_of_lives(habits)
    lead(lives, settings.default.max_examples if LONG else 20, 60, derandomize=not LONG)
    print(f"{habits.kind}: {json.dumps(dict(sorted(counted.items())))}")


@each_kind
def test_nor_where_the_ledger_is_in_postgresql(habits: Habits, empty_ledgers: Any) -> None:
    lives, _ = kind_of_lives(habits, lambda _: empty_ledgers())
    lead(lives, 3, 40, derandomize=True)


def submission(life: Lives) -> Process:
    return life.begin("here", "submit", life.submission_of(life.spec))


def array(life: Lives) -> Process:
    return life.begin("here", "array", life.array_of(life.spec))


def retry(life: Lives) -> Process:
    submission(life).go()
    for run in life.world.alive():
        run.becomes(Phase.FAILED, Cause.CRASH)
    life.begin("there", "pass", lambda client: client.refresh()).go()
    life.world.pass_time(60)
    return life.begin("here", "pass", lambda client: client.refresh())


def cancellation(life: Lives) -> Process:
    submission(life).go()
    return life.begin("there", "cancel", lambda client: client.cancel(life.ids))


def cancellation_of_what_was_given_up(life: Lives) -> Process:
    """A copy is on its way all the same, and nobody expects it any more."""
    life.world.trouble["submit"] = "overdue"
    submission(life).go()
    life.world.trouble["submit"] = "unreachable"
    for _ in range(2):
        life.begin("there", "pass", lambda client: client.refresh()).go()
        life.world.pass_time(life.habits.visibility_s)
    return life.begin("here", "cancel", lambda client: client.cancel(life.ids))


WORK = [submission, retry, cancellation, cancellation_of_what_was_given_up]


@pytest.mark.parametrize(
    ("habits", "work"),
    [*itertools.product(KINDS, WORK), (SLURM, array)],
    ids=lambda value: value.kind if isinstance(value, Habits) else value.__name__,
)
def test_every_step_of_a_process_may_be_its_last(habits: Habits, work: Any) -> None:
    lives, _ = kind_of_lives(habits)
    for last in itertools.count(1):
        life = lives()
        process = work(life)
        process.go(lambda steps, at, last=last: steps >= last)
        done = process.over
        process.kill()
        life.processes.clear()
        life.teardown()
        cancelled = {"CANCELLED"} if work in (cancellation, cancellation_of_what_was_given_up) else set()
        assert set(life.ended_as) <= {"SUCCEEDED", *cancelled}
        if done:
            break
    assert last > 5
