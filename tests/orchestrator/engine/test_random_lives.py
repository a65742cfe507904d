"""Random lives of jobs under a backend that misbehaves: the promises hold at every step, whatever happens."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fake_backend import FakeBackend
from fake_clock import Clock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orc.launchers.backends.base import Phase, Snapshot
from orc.launchers.errors import LaunchError
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.spec import JobSpec, load_job
from orc.orchestrator.client import Client
from orc.orchestrator.engine.snapshots import take
from orc.orchestrator.engine.submission import start
from orc.orchestrator.ledger.lifecycle import Event, Kind, fold

JOB = """\
name: j
command: 'true'
launcher: python
retry: {max_attempts: 3, on: [crash, preempted, node_failure], backoff: 5}
"""
TROUBLE = {
    "submit": [None, None, "refuse", "unreachable", "ambiguous", "swallowed", "bug"],
    "poll": [None, None, "unreachable", "bug"],
    "find": [None, None, "unreachable"],
    "stage": [None, None, "unreachable"],
    "cancel": [None, None, "unreachable"],
}


@functools.cache
def _ingredients() -> tuple[JobSpec, Snapshot, ContentStore]:
    directory = Path(tempfile.mkdtemp(prefix="orc-random-lives-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "project").mkdir()
    (directory / "project" / "job.yaml").write_text(JOB)
    loaded = load_job(directory / "project" / "job.yaml")
    store = ContentStore(directory / "store")
    return loaded.spec, take(store, loaded, lambda *_: None, FakeBackend(directory / "cluster")), store


class RandomLives(RuleBasedStateMachine):
    most_jobs = 3
    troubles: ClassVar[Mapping[str, list[Any]]] = TROUBLE

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        root = Path(self.directory.name)
        self.ids: list[str] = []  # in order of creation, so that a replay chooses the same
        self.clock = Clock()
        self.backend = self.make_backend(root / "fake")
        self.client = Client(
            root / "state", backend_of=lambda _: self.backend, clock=self.clock, sleep=self.clock.sleep
        )
        spec, self.snapshot, self.client.workspace.store = _ingredients()
        self.specs = [spec]

    def make_backend(self, root: Path) -> FakeBackend:
        return FakeBackend(root, visibility_s=10.0)

    @initialize(data=st.data())
    def first(self, data) -> None:
        self.submit(data)

    @rule(data=st.data())
    def submit(self, data) -> None:
        if len(self.ids) == self.most_jobs:
            return
        self.clock.now += 0.001  # no two jobs are of the same age
        spec = data.draw(st.sampled_from(self.specs))
        # What the user is told is checked elsewhere; here only what is true afterwards.
        with contextlib.suppress(LaunchError, KeyError):
            start(self.client.workspace, spec, self.snapshot, source="", progress=lambda *_: None)
        self.ids += {row.id for row in self.client.jobs()} - set(self.ids)

    @rule(data=st.data())
    def trouble(self, data) -> None:
        what = data.draw(st.sampled_from(sorted(self.troubles)))
        self.backend.behave(**{what: data.draw(st.sampled_from(self.troubles[what]))})

    @rule()
    def reconcile(self) -> None:
        self.client.refresh()

    @rule(seconds=st.sampled_from([1.0, 11.0, 400.0]))
    def time_passes(self, seconds) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        self.client.cancel([data.draw(st.sampled_from(self.ids))])

    @precondition(lambda self: self.backend.calls("run"))
    @rule(
        data=st.data(),
        end=st.sampled_from(
            [
                (Phase.RUNNING, None),
                (Phase.RUNNING, None),
                (Phase.UNKNOWN, None),
                (Phase.SUCCEEDED, None),
                (Phase.FAILED, "crash"),
                (Phase.FAILED, "preempted"),
                (Phase.LOST, None),
            ]
        ),
    )
    def happens(self, data, end) -> None:
        marker = data.draw(st.sampled_from(self.backend.calls("run")))
        if self.backend._observe(marker).phase in (Phase.PENDING, Phase.RUNNING, Phase.UNKNOWN):
            blamed = [host for host in self.backend.hosts if data.draw(st.booleans())] if end[0] is Phase.LOST else []
            self.backend.set(marker, end[0], cause=end[1], failed_hosts=blamed)

    @invariant()
    def columns_equal_events(self) -> None:
        for view in map(self.client.job, self.ids):
            told = fold(Event(Kind(e.kind), e.attempt, e.data) for e in self.client.events(view.id))
            assert told.job == view.state
            assert told.attempts == {a.number: a.state for a in view.attempts}

    @invariant()
    def nothing_runs_twice_and_never_two_attempts_at_once(self) -> None:
        runs = self.backend.calls("run")
        assert len(runs) == len(set(runs))
        for job_id in self.ids:
            alive = [m for m in runs if m.startswith(f"orc-{job_id}-a") and not self.backend._observe(m).phase.ended]
            assert len(alive) <= 1

    @invariant()
    def what_has_ended_says_why_and_when(self) -> None:
        for view in map(self.client.job, self.ids):
            assert view.ended == (view.ended_at is not None)
            for attempt in view.attempts:
                assert (attempt.cause is None) == (attempt.state not in ("FAILED", "PREEMPTED", "LOST", "CANCELLED"))

    def teardown(self) -> None:
        """With the trouble over, every job comes to an end that agrees with what happened on the cluster."""
        self.backend.behave(**dict.fromkeys(self.troubles, ()))
        for _ in range(200):
            for marker in self.backend.calls("run"):
                if not self.backend._observe(marker).phase.ended:
                    self.backend.set(marker, Phase.SUCCEEDED)
            self.clock.now += 700
            self.client.refresh()
        for view in map(self.client.job, self.ids):
            assert view.ended, view
            ran = {m: self.backend._observe(m).phase for m in self.backend.calls("run")}
            assert (view.state == "SUCCEEDED") == (Phase.SUCCEEDED in [ran.get(a.marker) for a in view.attempts])
        self.client.close()
        self.directory.cleanup()


class CrowdedLives(RandomLives):
    """The same on hosts that orc chooses, and of which there are too few."""

    most_jobs = 6
    troubles: ClassVar[Mapping[str, list[Any]]] = {
        **TROUBLE,
        "submit": [*TROUBLE["submit"], None, "busy"],
        "dead": [(), (), ("n1",), ("n2", "n3")],
        "cut": [(), (), ("n2",), ("n1", "n3")],
    }
    shapes = ((1, 1), (1, 2), (2, 1), ("2:3", 1), (3, 1))  # nodes and slots on each

    def __init__(self) -> None:
        super().__init__()
        (spec,) = self.specs
        self.specs = [
            spec.model_copy(
                update={"resources": spec.resources.model_copy(update={"nodes": nodes, "procs_per_node": slots})}
            )
            for nodes, slots in self.shapes
        ]

    def make_backend(self, root: Path) -> FakeBackend:
        return FakeBackend(root, visibility_s=10.0, hosts={"n1": 2, "n2": 1, "n3": 1})

    @invariant()
    def no_host_is_promised_or_used_beyond_its_slots(self) -> None:
        promised, used = Counter[str](), Counter[str]()
        for reservation in self.client.reservations():
            promised[reservation.host] += reservation.slots
        for marker in self.backend.calls("run"):
            handle = self.backend._handle(marker)
            if not self.backend._observe(marker).phase.ended:
                used.update(dict.fromkeys(handle.hosts, self.slots_of(marker)))
        for host, slots in self.backend.hosts.items():
            assert promised[host] <= slots
            assert used[host] <= slots

    def slots_of(self, marker: str) -> int:
        spec = self.client.workspace.ledger.spec(marker.removeprefix("orc-").rpartition("-a")[0])
        return int(spec["resources"]["procs_per_node"])

    @invariant()
    def hosts_are_kept_for_attempts_that_have_not_ended_and_for_all_that_may_be_there(self) -> None:
        held: dict[str, list[str]] = {}
        for reservation in sorted(self.client.reservations(), key=lambda r: r.node):
            held.setdefault(reservation.marker, []).append(reservation.host)
        for view in map(self.client.job, self.ids):
            for attempt in view.attempts:
                hosts = held.pop(attempt.marker, None)
                if attempt.state in ("SUBMITTING", "AMBIGUOUS", "PENDING", "RUNNING"):
                    assert hosts == list(attempt.hosts)
                elif attempt.state != "PREPARED":
                    assert hosts is None
        assert not held


RandomLives.TestCase.settings = CrowdedLives.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None
)
TestRandomLives = RandomLives.TestCase
TestCrowdedLives = CrowdedLives.TestCase
