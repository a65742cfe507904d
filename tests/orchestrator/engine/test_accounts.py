"""Accounts of users on a cluster: jobs are sent, asked about and ended with the connection of their owner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend
from fake_clock import Clock

from orc.launchers.attempts.records import LogSelector
from orc.launchers.backends.base import Handle, Phase, QueuedJob, QueueReport
from orc.launchers.errors import BackendUnreachable, LaunchError, RenderError, SpecError
from orc.launchers.remote.transport import LocalTransport
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.spec import LoadedJob
from orc.launchers.spec.clusters import Cluster
from orc.launchers.transfer.targets import Targets
from orc.orchestrator.api.clusters import read_queue
from orc.orchestrator.api.session import Caller
from orc.orchestrator.cli.main import main
from orc.orchestrator.client import Client
from orc.orchestrator.engine import delivery as steps
from orc.orchestrator.engine.job_source import take
from orc.orchestrator.engine.submission import new_submission, submit
from orc.orchestrator.ledger import polls
from orc.orchestrator.workspace import NoAccount, login_name

JobFile = Callable[..., LoadedJob]
RUN_AS = {"ada": "a-lovelace", "grace": {"user": "hopper", "root": "~/orc", "options": {"account": "navy"}}}


class Reached(FakeBackend):
    """The fake of an account, with its store and the queue that it sees."""

    def stores(self, plan: Any = None) -> Targets:
        if self._behaviour().get("stores"):
            raise BackendUnreachable("nobody may log in", where="fake")
        return Targets({"login1": (LocalTransport(), str(self.root))}, {})

    def queue(self, handles: Sequence[Handle]) -> QueueReport:
        self._called("queue", " ".join(handle.marker for handle in handles))
        return QueueReport((), tuple(QueuedJob(one.marker, one.native_id, "PENDING", "main", 1) for one in handles))


class Accounts:
    """A client, and what each account of a cluster has: the first is that of the service itself."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.clusters: dict[str, Cluster] = {}
        self.own = self.made(root / "own")
        self.fakes = {login: self.made(root / login) for login in ("a-lovelace", "hopper")}
        self.client = Client(backend_of=lambda _: self.own, clock=clock, sleep=clock.sleep)
        self.client.workspace.backend_for = self.open
        self.map(RUN_AS)

    def made(self, root: Path) -> FakeBackend:
        made = Reached(root)
        made.logs_in, made.self_driving = True, False
        return made

    def map(self, run_as: Any) -> None:
        """Change clusters.yaml, which every command reads anew."""
        self.own.cluster = Cluster(name="local", kind="ssh", root="/shared", options={"slots": 2}, run_as=run_as)
        self.client.workspace._backends.clear()

    def open(self, cluster: Cluster) -> FakeBackend:
        assert cluster.login is not None
        self.clusters[cluster.login] = cluster
        return self.fakes[cluster.login]

    def submit(self, user: str, loaded: LoadedJob) -> str:
        ws = self.client.workspace
        ws.user = user
        snapshot = take(ws.store, loaded, lambda *_: None, self.own)
        return submit(ws, [new_submission(ws, loaded.spec, snapshot, source="")])[0]


@pytest.fixture
def accounts(orc_home: Path, tmp_path: Path, clock: Clock) -> Iterator[Accounts]:
    made = Accounts(tmp_path, clock)
    with made.client:
        yield made


@pytest.fixture
def orc(accounts: Accounts, capfd: Any, monkeypatch: Any) -> Callable[..., tuple[int, str, str]]:
    """`orc ARGS...` with the client of the accounts."""
    monkeypatch.setattr("orc.orchestrator.cli.commands.snapshots.open_ledger", lambda **_: accounts.client)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return main(arguments), *capfd.readouterr()

    return run


def polled(accounts: Accounts) -> dict[str, str | None]:
    with accounts.client.workspace.ledger.database.read() as connection:
        return {poll.account: poll.error for poll in polls.all_polls(connection)}


def test_jobs_are_sent_seen_and_ended_with_the_account_of_their_owner(accounts, clock, job_file: JobFile) -> None:
    client, fakes = accounts.client, accounts.fakes
    hers, his = accounts.submit("ada", job_file()), accounts.submit("grace", job_file())
    assert [len(fakes[login].calls("run")) for login in ("a-lovelace", "hopper")] == [1, 1]
    assert accounts.clusters["hopper"].options == {"slots": 2, "account": "navy"}
    assert (accounts.clusters["hopper"].root, accounts.clusters["a-lovelace"].root) == ("~/orc", "/shared")
    fakes["a-lovelace"].set(fakes["a-lovelace"].calls("run")[0], Phase.RUNNING)
    fakes["hopper"].behave(poll="unreachable")
    clock.now += 5
    assert client.refresh().unreachable == {"local": "controller is down"}
    assert (client.job(hers).state, client.job(his).state) == ("RUNNING", "PENDING")
    assert polled(accounts) == {"ada": None, "grace": "controller is down"}
    with client.workspace.ledger.database.read() as connection:
        told = [polls.by_cluster(connection, only)[0].error for only in (None, "grace", "ada")]
    assert told == ["grace: controller is down"] * 2 + ["it could not be asked with the account of another user"]
    assert b"".join(c.data for c in client.read_log(hers, LogSelector(rank=0))).startswith(b"log of")
    client.cancel([his], grace_s=1)
    assert fakes["hopper"].calls("cancel") == [f"{fakes['hopper'].calls('run')[0]} 1"]
    fakes["hopper"].behave(poll=None)
    clock.now += 5
    client.refresh()
    assert client.job(his).state == "CANCELLED"
    assert not any(accounts.own.calls(name) for name in ("run", "poll", "cancel", "stage"))


def test_a_retry_and_a_cut_off_submission_go_to_the_same_account(accounts, job_file: JobFile) -> None:
    client, fake = accounts.client, accounts.fakes["hopper"]
    fake.behave(submit="ambiguous")
    his = accounts.submit("grace", job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0}))
    client.workspace.user = "somebody who passes by"
    client.refresh()
    assert client.job(his).state == "PENDING"
    fake.behave(submit=None)
    fake.set(fake.calls("run")[0], Phase.FAILED, cause="crash")
    client.refresh()
    assert [fake.calls("reap"), len(fake.calls("run"))] == [fake.calls("run")[:1], 2]
    assert not accounts.own.calls("run") + accounts.fakes["a-lovelace"].calls("run")


def test_who_has_no_account_gets_none(accounts, job_file: JobFile) -> None:
    with pytest.raises(RenderError, match="jobs of eve have no account on the cluster local"):
        accounts.submit("eve", job_file())
    own = accounts.submit(login_name(), job_file())  # whose connection it is
    assert accounts.own.calls("run") == [f"orc-{own}-a1"]


def test_jobs_of_a_user_whose_account_was_taken_away_stay_as_they_are(accounts, clock, job_file: JobFile) -> None:
    client = accounts.client
    hers, his = accounts.submit("ada", job_file()), accounts.submit("grace", job_file())
    accounts.map({"grace": RUN_AS["grace"]})
    clock.now += 5
    assert client.refresh().unreachable == {
        "local": f"jobs of ada have no account on the cluster local; {NoAccount.advice}"
    }
    assert "have no account" in client.job(hers).reason
    assert client.job(his).reason == ""
    with pytest.raises(LaunchError, match="no account"):
        list(client.read_log(hers, LogSelector(rank=0)))
    assert client.cancel([hers])[0].state == "PENDING"
    accounts.map(RUN_AS)
    client.refresh()
    assert client.job(hers).state == "CANCELLED"


def test_a_retry_of_a_user_whose_account_was_taken_away_waits_for_it(accounts, clock, job_file: JobFile) -> None:
    client, fake = accounts.client, accounts.fakes["a-lovelace"]
    hers = accounts.submit("ada", job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 60}))
    fake.set(f"orc-{hers}-a1", Phase.FAILED, cause="crash")
    clock.now += 5
    client.refresh()
    for run_as, why in (
        ({"grace": "hopper"}, "jobs of ada have no account on the cluster local"),
        ({"ada": "byron"}, "an attempt of ada was sent with an account that is not theirs any more"),
    ):
        accounts.map(run_as)
        clock.now += 100
        client.refresh()
        assert (client.job(hers).state, client.job(hers).reason) == (
            "QUEUED",
            f"{why}; {NoAccount.advice}, or `orc cancel` ends it",
        )
    accounts.map(RUN_AS)
    clock.now += 100
    client.refresh()
    assert (client.job(hers).state, len(fake.calls("run"))) == ("PENDING", 2)


def test_jobs_that_live_while_accounts_change_are_reached_as_they_were_sent(accounts, clock, job_file: JobFile) -> None:
    client, own, fakes = accounts.client, accounts.own, accounts.fakes
    accounts.map("service")
    hers = accounts.submit("ada", job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0}))
    accounts.map(RUN_AS)
    his = accounts.submit("grace", job_file())
    own.set(f"orc-{hers}-a1", Phase.RUNNING)
    clock.now += 5
    assert not client.refresh().unreachable
    assert (client.job(hers).state, client.job(his).state) == ("RUNNING", "PENDING")
    assert b"".join(c.data for c in client.read_log(hers, LogSelector(rank=0))).startswith(b"log of")
    accounts.map({"ada": "a-lovelace", "grace": {"user": "hopper", "root": "/another"}})
    own.set(f"orc-{hers}-a1", Phase.FAILED, cause="crash")
    clock.now += 5
    assert not client.refresh().unreachable
    assert accounts.clusters["hopper"].root == "~/orc", "where it was sent, not where the next one goes"
    assert polled(accounts)["grace ~/orc"] is None
    accounts.map({"ada": "a-lovelace", "grace": "byron"})
    clock.now += 5
    (told,) = client.refresh().unreachable.values()
    assert told == "an attempt of grace was sent with an account that is not theirs any more; " + NoAccount.advice
    assert client.job(his).state == "PENDING", "it is not lost, or it would be sent again while it runs"
    assert (own.calls("reap"), fakes["a-lovelace"].calls("run")) == ([f"orc-{hers}-a1"], [f"orc-{hers}-a2"])


def test_what_is_in_doubt_is_looked_for_with_the_account_that_it_was_sent_with(accounts, clock, job_file) -> None:
    client, own, hers_now = accounts.client, accounts.own, accounts.fakes["a-lovelace"]
    accounts.map("service")
    own.behave(submit="ambiguous")
    found = accounts.submit("ada", job_file())
    own.behave(submit="swallowed")
    lost = accounts.submit("ada", job_file())
    accounts.map(RUN_AS)
    client.refresh()
    assert hers_now.calls("find") == []
    assert [client.job(job).state for job in (found, lost)] == ["PENDING", "PENDING"]
    assert hers_now.calls("run") == [f"orc-{lost}-a1"]
    own._start(f"orc-{lost}-a1", {})  # it arrives after all, where no lease of the other one can be seen
    clock.now += 31
    client.refresh()
    assert own.calls("cancel") == [f"orc-{lost}-a1 0"]
    assert client.job(lost).state == "PENDING"
    assert (hers_now.calls("cancel"), client.events(lost)[-1].kind) == ([], "duplicate")


def test_a_sender_who_comes_late_ends_what_it_has_sent_elsewhere(accounts, clock, job_file) -> None:
    client, own = accounts.client, accounts.own
    accounts.map("service")
    own.behave(submit="swallowed")
    hers = accounts.submit("ada", job_file())
    sent = client.workspace.ledger.job(hers)
    accounts.map(RUN_AS)
    client.refresh()
    own._start(f"orc-{hers}-a1", {})
    (stored,) = steps.accept(client.workspace, [sent], [own._handle(f"orc-{hers}-a1")])
    assert own.calls("cancel") == [f"orc-{hers}-a1 0"]
    assert (stored.state, stored.attempt.sent_to.login) == ("PENDING", "a-lovelace")


def test_a_kind_without_logins_has_no_accounts_of_users(accounts, job_file: JobFile) -> None:
    accounts.own.logs_in = False
    with pytest.raises(SpecError, match="nobody logs in on clusters of kind fake"):
        accounts.submit("ada", job_file())


def _fill(ws: Any, root: Path, *digests: str) -> ContentStore:
    """Bring trees to the store of an account, where nobody has used them for a month."""
    there = ContentStore(root / "store")
    for digest in digests:
        ws.store.copy_to(there, digest)
    for path in [root, *root.rglob("*")]:
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    return there


def test_each_account_is_collected_with_its_own_connection(accounts, job_file, orc) -> None:
    client, fakes = accounts.client, accounts.fakes
    hers = accounts.submit("ada", job_file())
    needed = client.job(hers).digests["code"]
    (job_file().workdir / "more.py").write_text("print('of no job')\n")
    snapshot = take(client.workspace.store, job_file(), lambda *_: None, accounts.own)
    stores = {login: _fill(client.workspace, fake.root, needed, snapshot.code.digest) for login, fake in fakes.items()}
    fakes["hopper"].behave(stores="refused")
    code, out, _ = orc("gc", "--cluster", "local", "--json")
    hosts = json.loads(out)["hosts"]
    assert (code, [host.get("user") for host in hosts]) == (1, [None, "ada", "grace"])
    assert "nobody may log in" in hosts[2]["error"]
    assert [stores["a-lovelace"].has(digest) for digest in (needed, snapshot.code.digest)] == [True, False]
    assert stores["hopper"].has(snapshot.code.digest)
    fakes["hopper"].behave(stores=None)
    assert "login1 (grace)" in orc("gc", "--cluster", "local")[1]
    assert [stores["hopper"].has(digest) for digest in (needed, snapshot.code.digest)] == [True, False]


def test_users_of_one_account_are_collected_once(accounts) -> None:
    accounts.map({"ada": "shared", "grace": "shared", "alan": {"user": "shared", "root": "/elsewhere"}})
    assert accounts.client.workspace.accounts("local") == ["", "ada", "alan"]
    accounts.map({login_name(): "me"})
    assert accounts.client.workspace.accounts("local") == [login_name()]


def test_what_is_brought_along_beforehand_goes_to_the_account_of_who_asks(accounts, orc) -> None:
    ws = accounts.client.workspace
    ws.user = "ada"
    (brought,) = json.loads(orc("sync", "--cluster", "local", "--json")[1])["snapshots"]
    assert ContentStore(accounts.fakes["a-lovelace"].root / "store").has(brought["digest"])
    assert not (accounts.own.root / "store").exists()
    ws.user = "eve"
    code, _, said = orc("sync", "--cluster", "local")
    assert code == 2
    assert "jobs of eve have no account on the cluster local" in said


def test_a_queue_is_asked_with_the_account_of_who_asks_about_its_jobs(accounts, job_file) -> None:
    client, fakes = accounts.client, accounts.fakes
    hers, _ = accounts.submit("ada", job_file()), accounts.submit("grace", job_file())

    def ask(user: str) -> tuple[QueuedJob, ...]:
        return read_queue(client.session.on_behalf_of(Caller(user, "viewer")), "local").jobs

    (shown,) = ask("ada")
    assert (shown.job, shown.marker) == (hers, f"orc-{hers}-a1"), "a page leads from the queue to the job"
    assert [fakes[login].calls("queue") for login in fakes] == [[f"orc-{hers}-a1"], []]
    with pytest.raises(RenderError, match="jobs of eve have no account"):
        ask("eve")
    accounts.map({"ada": "a-lovelace"})
    ask(login_name())  # a job whose owner has no account any more keeps nobody from asking
    assert accounts.own.calls("queue") == [""]
