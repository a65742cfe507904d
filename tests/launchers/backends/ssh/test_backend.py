"""The whole backend on hosts that are directories of this machine: real agents and links, and faults at every step."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from polling import polls, until

from orc.launchers.agent.procfs import boot_id, descendants, is_running, marked_processes, process_start
from orc.launchers.backends.base import Cause, Handle, LogSelector, Observation, Phase, Placement, Snapshot
from orc.launchers.backends.ssh import SshBackend
from orc.launchers.backends.ssh.rendering import hosts_of
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable, NoRoom, PartlyUnreachable
from orc.launchers.ids import AttemptId, new_job_id
from orc.launchers.plan import Plan
from orc.launchers.remote.transport import CommandTimeout, Completed, LocalTransport
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

ONCE = """
import os, pathlib
with open(pathlib.Path(os.environ["ORC_JOB_DIR"], "ran"), "a") as file:
    file.write(os.environ["RANK"])
print("rank", os.environ["RANK"])
"""
WAITING = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
while not pathlib.Path(os.environ["ORC_JOB_DIR"], "go").exists():
    time.sleep(0.05)
"""


class SimulatedHost(LocalTransport):
    """A directory of this machine that can fall silent, and lose one call on its way there or back."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.silent = False
        self.lose: tuple[str, str] | None = None  # which call, and whether before or after it was done
        self.asked: list[str] = []

    def _here(self) -> None:
        if self.silent:
            raise BackendUnreachable("it did not answer", where=self.name)

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, **more: Any) -> Completed:
        self._here()
        do = json.loads((stdin or b"")[int(argv[5]) :]).get("do")
        if do is None:  # of the sync
            return super().run(argv, stdin=stdin, **more)
        self.asked.append(do)
        lost, self.lose = (self.lose, None) if self.lose and self.lose[0] == do else (None, self.lose)
        if lost and lost[1] == "before":
            raise CommandTimeout("the link was cut", where=self.name)
        done = super().run(argv, stdin=stdin, **more)
        if lost:
            raise CommandTimeout("the link was cut", where=self.name)
        return done

    def read(self, path: str, **more: Any) -> bytes:
        self._here()
        return super().read(path, **more)

    def names(self, path: str) -> list[str]:
        self._here()
        return super().names(path)


class Lab:
    """Three hosts, and jobs on them."""

    def __init__(self, directory: Path, state: Path, *, shared: bool = False) -> None:
        self.hosts = {name: SimulatedHost(name, directory / ("all" if shared else name)) for name in ("a", "b", "c")}
        self.state = state
        self.workdir = directory / "workdir"
        self.workdir.mkdir()
        described = [{"name": name, "root": str(host.root)} for name, host in self.hosts.items()]
        # Where they share a root, they share the locks of this one machine's slots too.
        # A busy machine is no silence: none of these tests is about one.
        options = {"hosts": described, "peer_timeout": 30, "slots": 3 if shared else 0}
        self.cluster = Cluster(name="lab", kind="ssh", root="/nowhere", options=options)
        self.backend = self.open()

    def open(self) -> SshBackend:
        """What another laptop, or this one after a crash, has of the cluster."""
        return SshBackend(self.cluster, state_dir=self.state, open_all=lambda: self.hosts)

    def plan(self, script: str = ONCE, hosts: str = "ab", *, attempt: AttemptId | None = None, **spec: Any) -> Plan:
        (self.workdir / "train.py").write_text(script)
        described = {"name": "sim", "script": "train.py", "launcher": "python", "grace": 5, **spec}
        job = JobSpec.model_validate({**described, "resources": {"nodes": len(hosts)}})
        store = ContentStore(self.state / "store")
        snapshot = Snapshot(store.snapshot(self.workdir).bundle, store.ingest(runtime_bundle()))
        attempt = attempt or AttemptId(new_job_id("sim"), 1)
        plan = self.backend.render(job, snapshot, attempt, Placement(tuple(hosts), 1))
        self.backend.stage(snapshot, plan)
        return plan

    def directory(self, host: str, plan: Plan) -> Path:
        return self.hosts[host].root / "jobs" / plan.attempt.job / f"a{plan.attempt.number}"

    def ran(self, plan: Plan) -> str:
        """The ranks that have run, over all hosts."""
        files = [self.directory(host, plan).parent / "ran" for host in self.hosts]
        return "".join(sorted("".join(file.read_text() for file in files if file.exists())))

    def go(self, plan: Plan) -> None:
        for host in hosts_of(plan):
            (self.directory(host, plan).parent / "go").touch()

    def until(self, handle: Handle, done: Callable[[Observation], bool], timeout_s: float = 120) -> Observation:
        for _ in polls(timeout_s):
            if done(seen := self.backend.poll([handle])[handle]):
                return seen
        raise AssertionError(seen)

    def wait(self, handle: Handle) -> Observation:
        return self.until(handle, lambda seen: seen.phase.ended)

    def until_left(self) -> None:
        """Wait until no agent holds the token of a link any more."""
        until(lambda: not any((directory / "link.json").exists() for directory in self.directories()))

    def left(self) -> list[int]:
        return [pid for d in self.directories() for pid in marked_processes(str(d))]

    def directories(self) -> list[Path]:
        return list(dict.fromkeys(path for host in self.hosts.values() for path in host.root.glob("jobs/*/a*")))


@pytest.fixture
def lab(tmp_path: Path, orc_home: Path, bare_runtime: None) -> Iterator[Lab]:
    made = Lab(tmp_path, orc_home / "state")
    yield made
    for host in made.hosts.values():
        host.silent, host.lose = False, None
    left = made.left()
    # One question to each host, for all attempts.
    attempts = dict.fromkeys(AttemptId(path.parent.name, int(path.name[1:])).marker for path in made.directories())
    made.backend.cancel([Handle("lab", "ssh", one, "", 0, ("a", "b", "c")) for one in attempts], timedelta(0))
    deadline = time.monotonic() + 60
    while made.left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, "the test left ranks running"


def text(lab: Lab, handle: Handle, rank: int, offset: int = 0) -> str:
    return b"".join(c.data for c in lab.backend.logs(handle, LogSelector(rank=rank), offset)).decode()


def test_a_job_runs_on_hosts_that_share_nothing(lab: Lab) -> None:
    plan = lab.plan(secrets=["TOKEN"])
    handle = lab.backend.submit(plan, {"TOKEN": "geheim-4711"})
    assert handle.hosts == ("a", "b")
    seen = lab.wait(handle)
    assert (seen.phase, seen.hosts, lab.ran(plan)) == (Phase.SUCCEEDED, ("a", "b"), "01")
    assert [text(lab, handle, rank) for rank in (0, 1)] == ["rank 0\n", "rank 1\n"]
    assert text(lab, handle, 1, offset=5) == "1\n"
    assert [(s.rank, s.node) for s in lab.backend.log_selectors(handle)] == [(0, None), (1, None), (None, 0), (None, 1)]
    assert lab.backend.read_file(handle, "ran") == b"0"
    for directory in lab.directories():
        for file in directory.rglob("*"):
            assert not file.is_file() or b"geheim-4711" not in file.read_bytes()


def test_all_attempts_are_polled_with_one_question_to_each_host(lab: Lab) -> None:
    handles = [lab.backend.submit(lab.plan(hosts=host), {}) for host in ("a", "b", "c")]
    both = lab.backend.submit(lab.plan(hosts="abc"), {}) if all(lab.wait(h) for h in handles) else handles[0]
    lab.wait(both)
    for host in lab.hosts.values():
        host.asked.clear()
    assert {seen.phase for seen in lab.backend.poll([*handles, both]).values()} == {Phase.SUCCEEDED}
    assert [host.asked for host in lab.hosts.values()] == [["status"]] * 3


def test_a_busy_host_is_named_with_its_holder_and_nothing_is_left(lab: Lab) -> None:
    first = lab.plan(WAITING, "b")
    held = lab.backend.submit(first, {})
    second = lab.plan(ONCE, "ab")
    with pytest.raises(NoRoom) as caught:
        lab.backend.submit(second, {})
    assert (caught.value.where, caught.value.holders) == ("b", (first.marker,))
    assert not any(lab.directory(host, second).exists() for host in "abc")
    assert lab.backend.find(second.marker) is None
    lab.go(first)
    assert lab.wait(held).phase is Phase.SUCCEEDED
    deadline = time.monotonic() + 60
    while True:
        try:
            again = lab.backend.submit(second, {})
            break
        except NoRoom:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert lab.wait(again).phase is Phase.SUCCEEDED
    assert lab.ran(second) == "01"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("host", "do"), [("a", "prepare"), ("b", "prepare"), ("a", "start"), ("b", "start")])
def test_a_submission_that_is_cut_off_anywhere_runs_once(lab: Lab, host: str, do: str, when: str) -> None:
    plan = lab.plan()
    lab.hosts[host].lose = (do, when)
    with pytest.raises(BackendUnreachable if do == "prepare" else AmbiguousSubmit):
        lab.backend.submit(plan, {})
    lab.backend = lab.open()
    handle = lab.backend.find(plan.marker)
    if handle is None:
        handle = lab.backend.submit(plan, {})
    assert handle.hosts == ("a", "b")
    assert lab.wait(handle).phase is Phase.SUCCEEDED
    assert lab.ran(plan) == "01"


def test_what_was_started_half_waits_for_a_host_that_another_has_taken_meanwhile(lab: Lab) -> None:
    plan, other = lab.plan(), lab.plan(WAITING, "b")
    lab.hosts["b"].lose = ("start", "before")
    with pytest.raises(AmbiguousSubmit):
        lab.backend.submit(plan, {})
    held = lab.backend.submit(other, {})
    handle = lab.backend.find(plan.marker)
    assert handle is not None
    seen = lab.backend.poll([handle, held])
    assert seen[held].phase in (Phase.PENDING, Phase.RUNNING)
    assert seen[handle].phase in (Phase.PENDING, Phase.RUNNING)
    assert seen[handle].reason.startswith("starting on b: ")
    assert other.marker in seen[handle].reason
    lab.go(other)
    assert lab.wait(held).phase is Phase.SUCCEEDED
    assert lab.wait(handle).phase is Phase.SUCCEEDED
    assert lab.ran(plan) == "01"


def test_a_host_that_refuses_ends_what_was_started_on_the_others(lab: Lab) -> None:
    plan = lab.plan()
    agent = lab.hosts["b"].root / "store" / "trees" / plan.trees["runtime"] / "lib/orc/launchers/agent/start.py"
    agent.chmod(0o600)
    agent.write_text("raise OSError('no more')")
    with pytest.raises(BackendError) as caught:
        lab.backend.submit(plan, {})
    assert not isinstance(caught.value, BackendUnreachable | AmbiguousSubmit)
    assert caught.value.where == "b"
    assert not any(lab.directory(host, plan).exists() for host in "ab")


def test_nothing_is_found_where_nothing_was_started(lab: Lab) -> None:
    plan = lab.plan()
    assert lab.backend.find(plan.marker) is None
    lab.hosts["c"].silent = True
    with pytest.raises(BackendUnreachable, match="c does not answer"):
        lab.backend.find(plan.marker)  # it may be there


def test_a_silent_host_that_is_none_of_the_attempts_is_not_waited_for(lab: Lab) -> None:
    plan = lab.plan(WAITING)
    handle = lab.backend.submit(plan, {})
    lab.hosts["c"].silent = True
    found = lab.backend.find(plan.marker)
    assert found is not None
    assert (found.hosts, found.native_id) == (handle.hosts, handle.native_id)
    lab.go(plan)
    assert lab.wait(found).phase is Phase.SUCCEEDED


def test_a_silent_host_that_the_attempt_was_not_given_does_not_matter(lab: Lab) -> None:
    plan = lab.plan()
    lab.hosts["c"].silent = True
    assert lab.backend.find(plan.marker, ("a", "b")) is None
    with pytest.raises(BackendUnreachable, match="c does not answer"):
        lab.backend.find(plan.marker, ("a", "c"))


def test_what_was_started_half_and_is_to_be_cancelled_is_not_completed(lab: Lab) -> None:
    plan = lab.plan()
    lab.hosts["b"].lose = ("start", "before")
    with pytest.raises(AmbiguousSubmit):
        lab.backend.submit(plan, {})
    handle = lab.backend.find(plan.marker, ("a", "b"), complete=False)
    assert handle is not None
    lab.backend.cancel([handle], timedelta(0))
    seen = lab.wait(handle)
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert lab.ran(plan) == ""
    assert not (lab.directory("b", plan) / "node-1" / "lease.json").exists()


def test_what_could_not_be_ended_is_not_taken_for_gone(lab: Lab) -> None:
    other = lab.plan(WAITING, "b")
    held = lab.backend.submit(other, {})
    plan = lab.plan(ONCE, "ab")
    lab.hosts["a"].lose = ("undo", "before")
    with pytest.raises(AmbiguousSubmit, match="what was started on a could not be ended"):
        lab.backend.submit(plan, {})
    # The same attempt elsewhere would meet what runs on a.
    elsewhere = lab.plan(ONCE, "ac", attempt=plan.attempt)
    with pytest.raises(NoRoom, match="as it was started for other hosts"):
        lab.backend.submit(elsewhere, {})
    assert not lab.directory("c", plan).exists()
    handle = lab.backend.find(plan.marker, ("a", "b"))
    assert handle is not None
    lab.backend.cancel([handle], timedelta(0))
    lab.wait(handle)
    lab.go(other)
    assert lab.wait(held).phase is Phase.SUCCEEDED
    assert lab.ran(plan) == ""


def test_an_attempt_that_is_over_is_not_started_again_by_who_comes_late(lab: Lab) -> None:
    plan = lab.plan()
    handle = lab.backend.submit(plan, {})
    assert lab.wait(handle).phase is Phase.SUCCEEDED
    lab.until_left()
    again = lab.backend.submit(plan, {})
    assert (again.hosts, again.native_id) == (handle.hosts, handle.native_id)
    assert lab.wait(again).phase is Phase.SUCCEEDED
    assert lab.ran(plan) == "01"


def test_a_host_that_cannot_be_told_to_cancel_keeps_nobody_else_waiting(lab: Lab) -> None:
    first, second = (lab.backend.submit(lab.plan(WAITING, host), {}) for host in "ab")
    for handle in (first, second):
        lab.until(handle, lambda seen: seen.phase is Phase.RUNNING and not seen.reason)
    lab.hosts["a"].silent = True
    with pytest.raises(PartlyUnreachable) as caught:
        lab.backend.cancel([first, second], timedelta(seconds=5))
    assert (caught.value.markers, caught.value.where) == ((first.marker,), "a")
    assert lab.wait(second).phase is Phase.CANCELLED
    lab.hosts["a"].silent = False
    lab.backend.cancel([first], timedelta(seconds=5))
    assert lab.wait(first).phase is Phase.CANCELLED


def test_a_prepared_attempt_whose_first_host_is_silent_may_be_running(lab: Lab) -> None:
    plan = lab.plan()
    lab.hosts["a"].lose = ("start", "before")
    with pytest.raises(AmbiguousSubmit):
        lab.backend.submit(plan, {})
    lab.hosts["a"].silent = True
    with pytest.raises(BackendUnreachable, match="a does not answer"):
        lab.backend.find(plan.marker)
    lab.hosts["a"].silent, lab.hosts["b"].silent = False, True
    assert lab.backend.find(plan.marker) is None  # nothing starts before the first host does


def test_a_host_that_does_not_answer_the_laptop_changes_nothing(lab: Lab) -> None:
    plan = lab.plan(WAITING)
    handle = lab.backend.submit(plan, {})
    lab.until(handle, lambda seen: seen.phase is Phase.RUNNING and not seen.reason and text(lab, handle, 0) == "up\n")
    lab.hosts["b"].silent = True
    seen = lab.backend.poll([handle])[handle]
    assert (seen.phase, seen.reason) == (Phase.RUNNING, "no answer from b")
    assert text(lab, handle, 0) == "up\n"
    with pytest.raises(BackendUnreachable):
        text(lab, handle, 1)
    lab.hosts["a"].silent = True
    assert lab.backend.poll([handle])[handle].phase is Phase.UNKNOWN
    with pytest.raises(BackendUnreachable):
        lab.backend.cancel([handle], timedelta(0))
    lab.hosts["a"].silent = False
    lab.backend.cancel([handle], timedelta(seconds=5))  # the agents pass it on to the host that we cannot reach
    seen = lab.wait(handle)
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert not lab.left()


def test_a_killed_agent_is_a_lost_attempt_that_names_its_host_and_leaves_nothing(lab: Lab) -> None:
    plan = lab.plan(WAITING, retry={"on": ["node_failure"]})
    handle = lab.backend.submit(plan, {})
    lab.until(handle, lambda seen: seen.phase is Phase.RUNNING and not seen.reason)
    lease = json.loads((lab.directory("b", plan) / "node-1" / "lease.json").read_text())
    os.kill(int(lease["pid"]), signal.SIGKILL)
    seen = lab.wait(handle)
    assert (seen.phase, seen.cause, seen.failed_hosts) == (Phase.LOST, Cause.NODE_FAILURE, ("b",))
    assert "b" in seen.reason
    lab.backend.reap(handle)
    assert not lab.left()


@pytest.mark.parametrize("ends", ["killed", "between its record and the tidying up"])
def test_secrets_do_not_outlive_agents_that_were_killed(lab: Lab, ends: str) -> None:
    plan = lab.plan(WAITING, secrets=["TOKEN"])
    handle = lab.backend.submit(plan, {"TOKEN": "geheim-4711"})
    lab.until(handle, lambda seen: seen.phase is Phase.RUNNING and not seen.reason)
    files = [lab.directory(host, plan) / name for host in "ab" for name in ("secrets.json", "link.json")]
    assert all(file.exists() for file in files)
    if ends == "killed":
        lease = json.loads((lab.directory("b", plan) / "node-1" / "lease.json").read_text())
        os.kill(int(lease["pid"]), signal.SIGKILL)
    else:
        lab.go(plan)
    lab.wait(handle)
    if ends != "killed":
        files[2].write_text("{}")
    lab.until(handle, lambda seen: seen.phase.ended and not any(file.exists() for file in files))


def test_a_home_directory_is_that_of_the_host(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    lab.cluster = Cluster(name="lab", kind="ssh", root="~/orc dir", options={"hosts": ["a"]})
    lab.backend = lab.open()
    plan = lab.plan("import os; print(os.environ['ORC_CHECKPOINT_DIR'], os.environ['NOTE'])", "a", env={"NOTE": "~/x"})
    assert "~/orc dir" in plan.files[0].path
    handle = lab.backend.submit(plan, {})
    assert lab.wait(handle).phase is Phase.SUCCEEDED
    job = tmp_path / "home" / "orc dir" / "jobs" / plan.attempt.job
    assert text(lab, handle, 0) == f"{job}/checkpoints ~/x\n"


def test_a_missing_secret_is_refused_before_anything_is_written(lab: Lab) -> None:
    plan = lab.plan(secrets=["TOKEN"])
    with pytest.raises(BackendError, match="no value for the secret TOKEN"):
        lab.backend.submit(plan, {})
    assert not lab.directories()


def test_files_with_secrets_are_private(lab: Lab) -> None:
    plan = lab.plan(WAITING, secrets=["TOKEN"])
    handle = lab.backend.submit(plan, {"TOKEN": "x"})
    for host in "ab":
        directory = lab.directory(host, plan)
        assert directory.stat().st_mode & 0o077 == 0
        for name in ("secrets.json", "link.json", "agent.json"):
            assert (directory / name).stat().st_mode & 0o777 == 0o600
    lab.go(plan)
    lab.wait(handle)


def test_hosts_that_share_their_root_need_no_link(tmp_path: Path, orc_home: Path) -> None:
    (tmp_path / "shared").mkdir()
    lab = Lab(tmp_path / "shared", orc_home / "state", shared=True)
    both = "while len(pathlib.Path(os.environ['ORC_JOB_DIR'], 'ran').read_text()) < 2:\n    time.sleep(0.01)\n"
    fail = "sys.exit(3 * (os.environ['RANK'] == '1'))\n"
    plan = lab.plan(ONCE.replace("pathlib\n", "pathlib, sys, time\n") + both + fail)
    handle = lab.backend.submit(plan, {})
    seen = lab.wait(handle)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert seen.exit is not None
    assert seen.exit.first_failure is not None
    assert (seen.exit.first_failure.rank, seen.exit.first_failure.exit_code) == (1, 3)
    assert json.loads((lab.directory("a", plan) / "agent.json").read_text())["link"] is False
    assert sorted(lab.directory("a", plan).parent.joinpath("ran").read_text()) == ["0", "1"]
    until(lambda: not lab.left())
    assert not (lab.directory("a", plan) / "link.json").exists()


def test_an_agent_that_was_given_up_is_ended_when_its_host_comes_back(lab: Lab) -> None:
    plan = lab.plan(WAITING)
    handle = lab.backend.submit(plan, {})
    lab.until(handle, lambda seen: seen.phase is Phase.RUNNING and not seen.reason)
    lab.backend.reap(handle)
    lab.wait(handle)
    assert not lab.left()


def test_an_agent_that_was_given_up_and_is_stopped_is_ended_before_its_ranks_go_on(lab: Lab) -> None:
    plan = lab.plan(WAITING, "a")
    handle = lab.backend.submit(plan, {})
    lab.until(handle, lambda seen: seen.phase is Phase.RUNNING and text(lab, handle, 0) == "up\n")
    node = lab.directory("a", plan) / "node-0"
    agent = json.loads((node / "lease.json").read_text())["pid"]
    for pid in (agent, *descendants(agent)):
        os.kill(pid, signal.SIGSTOP)
    for name in ("lease.json", "heartbeat.json"):  # as an hour later
        record = json.loads((node / name).read_text())
        (node / name).write_text(json.dumps({**record, "at": record["at"] - 3600}))
    assert "it is stopped" in lab.backend.poll([handle])[handle].reason
    lab.backend.reap(handle)
    assert not is_running(agent, process_start(agent) or "", boot_id())
    assert not lab.left()


def test_what_was_prepared_and_never_started_does_not_stay(lab: Lab) -> None:
    plan = lab.plan(secrets=["TOKEN"])
    lab.hosts["a"].lose = ("start", "before")
    with pytest.raises(AmbiguousSubmit):
        lab.backend.submit(plan, {"TOKEN": "x"})
    assert (lab.directory("b", plan) / "secrets.json").exists()
    assert lab.backend.find(plan.marker) is None
    assert not lab.directories()
