"""A host whose link is cut at any moment of a submission, for every moment there is: the job runs once, elsewhere or
later. Real agents on hosts that are directories of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from polling import polls

from orc.launchers.agent.procfs import marked_processes
from orc.launchers.backends.base import LogSelector
from orc.launchers.backends.ssh import SshBackend
from orc.launchers.errors import BackendUnreachable, LinkLost
from orc.launchers.remote.transport import Completed, LocalProcess, LocalTransport
from orc.launchers.spec import LoadedJob
from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.client import Client
from orc.orchestrator.views import JobView

pytestmark = pytest.mark.usefixtures("bare_runtime")

# A line for each rank that has run, in a file beside the working copy; each host has its own.
ONCE = """
import os, pathlib
with open(pathlib.Path(os.environ["ORC_JOB_DIR"], "ran"), "a") as file:
    file.write(os.environ["ORC_ATTEMPT"] + os.environ["RANK"] + "\\n")
"""
FAILS_FIRST = f"""
import os, sys
if os.environ["ORC_ATTEMPT"] == "1":
    sys.exit("no")
{ONCE}
"""
STAYS = """
import time
print("up", flush=True)
while True:
    time.sleep(0.05)
"""


class Link:
    """The way to one host. It counts what goes over it, and is cut before or after the step number *cut_at*."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: list[str] = []
        self.cut_at: int | None = None
        self.after = False
        self.up = True
        self._lock = threading.Lock()

    def step(self, what: str, work: Callable[[], Any], *, underway: bool = False) -> Any:
        """Do *work* over the link."""
        with self._lock:
            number = len(self.steps)
            self.steps.append(what)
            cut = self.up and number == self.cut_at
            was_up = self.up
            self.up = self.up and not cut
        if not was_up:
            if underway:
                raise LinkLost("it has been silent for 3 s", where=self.name)
            raise BackendUnreachable("it cannot be reached: No route to host", where=f"{self.name} (10.0.0.2:22)")
        if cut and not self.after:
            raise LinkLost("the connection was cut", where=self.name)
        done = work()
        if cut:
            raise LinkLost("the connection was cut", where=self.name)
        return done


class LinkedProcess:
    """A program at the other end of a link."""

    def __init__(self, link: Link, process: LocalProcess) -> None:
        self._link, self._process = link, process

    def write(self, data: bytes) -> None:
        self._link.step("write", lambda: self._process.write(data), underway=True)

    def close_stdin(self) -> None:
        self._process.close_stdin()

    def read(self, size: int) -> bytes:
        found: bytes = self._link.step("read", lambda: self._process.read(size), underway=True)
        return found

    def wait(self) -> Completed:
        found: Completed = self._link.step("wait", self._process.wait, underway=True)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)  # whose link is cut, that is ended by its host


class LinkedHost(LocalTransport):
    """A directory of this machine at the other end of a link."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.link = Link(name)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        found: Completed = self.link.step("run", lambda: super(LinkedHost, self).run(argv, **more))
        return found

    def stream(self, argv: Sequence[str], *, timeout_s: float) -> Any:
        begin = super().stream
        return LinkedProcess(self.link, self.link.step("stream", lambda: begin(argv, timeout_s=timeout_s)))

    def expand(self, path: str) -> str:
        found: str = self.link.step("expand", lambda: super(LinkedHost, self).expand(path))
        return found

    def read(self, path: str, **more: Any) -> bytes:
        found: bytes = self.link.step("read a file", lambda: super(LinkedHost, self).read(path, **more))
        return found

    def read_many(self, paths: Any) -> dict[str, bytes]:
        found: dict[str, bytes] = self.link.step("read files", lambda: super(LinkedHost, self).read_many(paths))
        return found

    def names(self, path: str) -> list[str]:
        found: list[str] = self.link.step("names", lambda: super(LinkedHost, self).names(path))
        return found


class Lab:
    """Hosts, and a client that submits to them."""

    def __init__(self, directory: Path, count: int, preflight: bool) -> None:
        self.hosts = {name: LinkedHost(name, directory / name) for name in ("a", "b", "c")[:count]}
        described = [{"name": name, "root": str(host.root)} for name, host in self.hosts.items()]
        options = {"hosts": described, "peer_timeout": 10, "preflight": preflight}
        self.cluster = Cluster(name="lab", kind="ssh", root="/nowhere", options=options)
        self.client = Client(
            backend_of=lambda _: SshBackend(self.cluster, open_all=lambda: self.hosts),
            sleep=lambda seconds: time.sleep(min(seconds, 0.05)),
        )

    def heal(self) -> None:
        for host in self.hosts.values():
            host.link = Link(host.name)

    def ran(self, job: str) -> list[str]:
        """Attempt and rank of each that has run, over all hosts."""
        files = [host.root / "jobs" / job / "ran" for host in self.hosts.values()]
        return sorted(line for file in files if file.exists() for line in file.read_text().split())

    def wait(self, job: str) -> JobView:
        (view,) = self.client.wait([job], timeout_s=120)
        return view

    def until_ended(self, job: str) -> None:
        """Wait until the agents of the first attempt have ended, without a look at the ledger or over a link."""
        pattern = f"jobs/{job}/a1/node-{{}}/exit.json"
        for _ in polls(120, 0.02):
            if (
                all((h.root / pattern.format(n)).exists() for n, h in enumerate(self.hosts.values()))
                and not self.left()
            ):
                return
        raise AssertionError(f"the agents of {job} have not ended")

    def until(self, job: str, done: Callable[[JobView], bool]) -> JobView:
        """Run passes until *done* says so."""
        for _ in polls(120):
            if done(view := self.client.job(job)):
                return view
            self.client.refresh([job])
        raise AssertionError(view)

    def left(self) -> list[int]:
        directories = [path for host in self.hosts.values() for path in host.root.glob("jobs/*/a*")]
        return [pid for directory in directories for pid in marked_processes(str(directory))]


@pytest.fixture
def make_lab(tmp_path: Path, orc_home: Path) -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(count: int = 3, *, preflight: bool = True) -> Lab:
        made.append(Lab(tmp_path / f"lab-{len(made)}", count, preflight))
        return made[-1]

    yield make
    for lab in made:
        lab.client.close()
        deadline = time.monotonic() + 30
        while (left := lab.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, "the test left processes running"


@pytest.fixture
def job(job_file: Callable[..., LoadedJob]) -> Callable[..., LoadedJob]:
    def write(script: str, turn: int = 0, **keys: Any) -> LoadedJob:
        """A job of two nodes; with another *turn* its snapshot is another one, which no host has."""
        loaded = job_file(**{"resources": {"nodes": 2}, "grace": 5, **keys})
        (loaded.base_dir / "train.py").write_text(f"{script}# {turn}\n")
        return loaded

    return write


def undisturbed(lab: Lab, job: Callable[..., LoadedJob]) -> list[str]:
    """What goes over the link of the second host while a job is submitted that nothing disturbs.

    It is the second job there: of later ones, too, only the code is new to the hosts.
    """
    for turn in (-2, -1):
        lab.heal()
        view = lab.client.submit(job(ONCE, turn))
        steps = list(lab.hosts["b"].link.steps)
        lab.wait(view.id)
    assert len(steps) > 5
    return steps


def moments(steps: Sequence[str], every: int = 1) -> list[tuple[int, bool]]:
    """Before each of *steps*, which means that none of it arrives, and after those that have an effect there.

    Of the many that are like the one before, only some are taken, and of all only *every* so many.
    """
    told = [n for n, step in enumerate(steps) if step not in ("read", "write") or steps[n - 2] != step or n % 3 == 0]
    return [(n, after) for n in told for after in ((False, True) if steps[n] == "run" else (False,))][::every]


def check_that_it_ran_once(lab: Lab, job: str, moment: object) -> None:
    view = lab.wait(job)
    assert (view.state, len(view.attempts)) == ("SUCCEEDED", 1), (moment, view.reason, lab.client.events(job))
    assert lab.ran(job) == ["10", "11"], moment


@pytest.mark.timeout(600)
@pytest.mark.parametrize("preflight", [True, False], ids=["in preflight", "after it"])
def test_a_link_that_is_cut_at_any_step_of_a_submission_costs_another_host_or_a_wait(
    make_lab: Callable[..., Lab], job: Callable[..., LoadedJob], preflight: bool
) -> None:
    lab = make_lab(preflight=preflight)
    steps = undisturbed(lab, job)
    if preflight:  # the rest is the other case
        steps = steps[: len(steps) - len(undisturbed(make_lab(preflight=False), job))]
    last = steps.count("run") - 1
    cuts = 0
    for turn, moment in enumerate(moments(steps, 2 if preflight else 3)):
        lab.heal()
        link = lab.hosts["b"].link
        link.cut_at, link.after = moment
        view = lab.client.submit(job(ONCE, turn))
        cuts += not link.up  # what is read comes in more pieces one time, in fewer another time
        if not link.up and view.attempts[-1].hosts != ("a", "c"):
            # The agent may have been started on the host that is away: that has to be found out first.
            assert not preflight
            assert link.steps[: moment[0]].count("run") >= last - 1, (moment, link.steps)
            lab.heal()
        check_that_it_ran_once(lab, view.id, (moment, steps))
    assert cuts > 3


@pytest.mark.timeout(600)
def test_where_there_is_no_other_host_a_submission_that_is_cut_off_waits_for_the_link(
    make_lab: Callable[..., Lab], job: Callable[..., LoadedJob]
) -> None:
    lab = make_lab(2, preflight=False)
    steps = undisturbed(lab, job)
    waited = 0
    for turn, moment in enumerate(moments(steps, 5)):
        lab.heal()
        lab.hosts["b"].link.cut_at, lab.hosts["b"].link.after = moment
        view = lab.client.submit(job(ONCE, turn))
        if view.state == "PREPARED":
            waited += 1
            assert view.reason.startswith("waiting for b: "), moment
            lab.client.refresh([view.id])
            assert (lab.client.job(view.id).state, lab.client.workspace.ledger.reservations()) == ("PREPARED", [])
        lab.heal()
        check_that_it_ran_once(lab, view.id, (moment, steps))
    assert waited > 1


def test_a_submission_that_finds_a_host_away_is_refused_where_there_is_no_other(
    make_lab: Callable[..., Lab], job: Callable[..., LoadedJob]
) -> None:
    """It is recorded as failed: it does not start when the host comes back."""
    lab = make_lab(2)
    lab.hosts["b"].link.up = False
    with pytest.raises(BackendUnreachable, match="No route to host") as refused:
        lab.client.submit(job(ONCE))
    assert refused.value.host == "b"
    assert [job.state for job in lab.client.jobs()] == ["FAILED"]
    assert lab.client.workspace.ledger.reservations() == []


@pytest.mark.timeout(600)
def test_a_link_that_is_cut_at_any_step_of_a_retry_costs_a_wait(
    make_lab: Callable[..., Lab], job: Callable[..., LoadedJob]
) -> None:
    """There is no other host. A pass that sends the next attempt never fails the job for it."""
    lab = make_lab(2)
    loaded = job(FAILS_FIRST, retry={"on": ["crash"], "backoff": 0})

    def fail_first() -> str:
        lab.heal()
        view = lab.client.submit(loaded)
        lab.until_ended(view.id)
        return view.id

    first = fail_first()
    before = len(lab.hosts["b"].link.steps)
    lab.until(first, lambda view: view.attempts[-1].number == 2 and view.state in ("PENDING", "RUNNING"))
    steps = lab.hosts["b"].link.steps[before:]
    assert lab.wait(first).state == "SUCCEEDED"
    for moment in moments(steps, 7):
        name = fail_first()
        link = lab.hosts["b"].link
        link.cut_at, link.after = len(link.steps) + moment[0], moment[1]
        for _ in range(3):
            lab.client.refresh([name])
        state = lab.client.job(name).state
        assert state != "FAILED", (moment, steps)
        assert link.up or state != "SUCCEEDED", (moment, steps)  # it may come in fewer pieces, and not be cut
        lab.heal()
        view = lab.wait(name)
        assert (view.state, len(view.attempts)) == ("SUCCEEDED", 2), (moment, steps, view.reason)
        assert lab.ran(name) == ["20", "21"], (moment, steps)


@pytest.mark.parametrize("cut_at", range(4))
def test_a_link_that_is_cut_while_a_job_is_watched_and_cancelled_costs_a_wait(
    make_lab: Callable[..., Lab], job: Callable[..., LoadedJob], cut_at: int
) -> None:
    lab = make_lab(2, preflight=False)
    name = lab.client.submit(job(STAYS)).id
    lab.until(name, lambda view: view.state == "RUNNING")
    selector = LogSelector(rank=1)

    def shown() -> bytes:
        return b"".join(chunk.data for chunk in lab.client.read_log(name, selector))

    deadline = time.monotonic() + 60
    while shown() != b"up\n":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for look in (lambda: lab.client.refresh([name]), lambda: lab.client.log_selectors(name), shown):
        lab.heal()
        lab.hosts["b"].link.cut_at = cut_at
        with suppress(BackendUnreachable):  # of what was asked of that very host
            look()
        assert lab.client.job(name).state == "RUNNING"
    lab.heal()
    assert shown() == b"up\n"
    lab.hosts["b"].link.cut_at = cut_at
    (view,) = lab.client.cancel([name], grace_s=1)
    assert view.state in ("RUNNING", "CANCELLED")
    lab.heal()
    assert lab.wait(name).state == "CANCELLED"
