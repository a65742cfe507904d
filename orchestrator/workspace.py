"""Workspace of the orchestrator: ledger, clusters, local store, clock. Passed explicitly."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from orc.launchers.errors import RenderError, SpecError
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.ledger.leases import abandon, new_owner
from orc.orchestrator.ledger.records import Destination, JobSize
from orc.orchestrator.ledger.store import Ledger

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend
    from orc.launchers.errors import LaunchError
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.snapshot.manifest import Bundle
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster, Limits
    from orc.orchestrator.ledger.database import Connection
    from orc.orchestrator.ledger.records import AttemptRecord


MOST_KEPT = 100_000  # jobs of which a workspace keeps something: more than are live, and no memory for months


def login_name() -> str:
    """Return the name of the effective user; the number where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class Access(NamedTuple):
    """Access to a cluster: with the account of a user, or ("") of this process; to a root of its own."""

    cluster: str
    user: str = ""
    root: str | None = None  # where it is not the one that clusters.yaml has now

    @property
    def account(self) -> str:
        """Name of the account, by which polls of the cluster are kept apart."""
        return self.user if self.root is None else f"{self.user} {self.root or '(default root)'}".strip()[:255]


@dataclass
class Workspace:
    """Orchestrator of one user, for one thread. `backend_of` opens the backend of a named cluster."""

    state_dir: Path
    ledger: Ledger
    backend_of: Callable[[str], Backend]
    clusters_file: Path | None = None  # that of the configuration directory unless given
    backend_for: Callable[[Cluster], Backend] | None = None  # that of a cluster as a user's account has it
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    owner: str = field(default_factory=new_owner)
    user: str = field(default_factory=login_name)  # whose new jobs are that nobody else submits
    subscriptions: Callable[[], Callable[[JobSpec], JobSpec]] = lambda: lambda spec: spec  # of the settings as they are
    on_live_job: Callable[[], None] = lambda: None  # called as soon as a new job is durable
    noted: dict[str, float] = field(default_factory=dict)  # by job: when the ledger was last told that it was seen
    sizes: dict[str, JobSize] = field(default_factory=dict)  # by job; its specification never changes
    head_starts: dict[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)  # by cluster, with age
    candidates: dict[str, frozenset[str]] = field(default_factory=dict)  # hosts that a job could run on
    spent: tuple[float, Mapping[tuple[str, str], float]] | None = None  # by users and projects, with its age
    runtime: Bundle | None = None  # of this process's own version, once a service has needed it
    _backends: dict[Access, Backend] = field(default_factory=dict)

    @cached_property
    def origin(self) -> str:
        """``host:directory`` of this orchestrator's snapshots and secrets: others that share the ledger have theirs."""
        return f"{os.uname().nodename}:{self.state_dir.absolute()}"

    def close(self) -> None:
        """Close the ledger, and the connections of all backends that were opened."""
        with contextlib.ExitStack() as closing:  # each is closed, also where closing another one fails
            closing.callback(self.ledger.close)
            for backend in self._backends.values():
                closing.callback(backend.close)

    def forget(self) -> None:
        """Drop what is kept by job where there is much of it: it is read again of those that still matter."""
        for kept in (self.noted, self.sizes, self.candidates):
            if len(kept) > MOST_KEPT:
                kept.clear()

    def size_of(self, connection: Connection, job: str) -> JobSize:
        """Return the size of *job*."""
        if job not in self.sizes:
            ((spec,),) = connection.tuples("SELECT spec FROM jobs WHERE id = :id", {"id": job})
            self.sizes[job] = JobSize.of(json.loads(spec))
        return self.sizes[job]

    def give_back(self, *job_ids: str) -> None:
        """Give the claims on jobs back. Where the ledger cannot be written, this process goes on at once.

        Raises `LedgerError`.
        """
        try:
            self.ledger.release(job_ids, self.owner)
        except LedgerError:
            abandon(self.owner)
            self.owner = new_owner()
            raise

    def backend(self, cluster: str) -> Backend:
        """Return the backend of *cluster*, opened once. Raises `LaunchError` for a cluster that is not configured.

        It reaches the cluster as the user of this process. What concerns jobs goes through `backend_of_user`.
        """
        return self.open(Access(cluster))

    def backend_of_user(self, cluster: str, user: str) -> Backend:
        """Return the backend of *cluster* for jobs of *user*: it reaches the cluster with the account of that user.

        Raises `LaunchError` for a cluster that is not configured, or where the user has no account.
        """
        return self.open(Access(cluster, self.account(cluster, user)))

    def account(self, cluster: str, user: str) -> str:
        """Return *user* where jobs of that user run with an account of their own on *cluster*, and "" where they run as
        whoever runs this process. Raises `LaunchError` where they must not run at all.
        """
        accounts = self.backend(cluster).cluster.run_as
        if not isinstance(accounts, dict):
            return ""
        if user in accounts:
            return user
        if user in ("", login_name()):  # jobs without an owner were submitted before there were owners
            return ""
        raise no_account(cluster, user)

    def destination(self, cluster: str, user: str, hosts: Collection[str] = ()) -> Destination:
        """Return the destination of an attempt of *user* on *hosts* now. Raises what `account` raises."""
        access = Access(cluster, self.account(cluster, user))
        described = self._described(access)
        backend = self.open(access)
        return Destination(described.login or "", described.root or "", backend.kind, backend.addresses(hosts))

    def access(self, cluster: str, user: str, sent_to: Destination | None) -> Access:
        """Return the way to what was sent to *sent_to* for a job of *user*, whatever clusters.yaml has become.

        Anywhere else it would not be found, and count as lost while it runs. Without *sent_to* it is the way to where
        it would be sent now. Raises `LaunchError` where `run_as` does not have that account for the user any more
        (`AnotherAccount`), or a machine has another address now (`Moved`).
        """
        if sent_to is None:
            return Access(cluster, self.account(cluster, user))
        kind = self.backend(cluster).kind
        if sent_to.kind and sent_to.kind != kind:
            raise Moved(
                f"the cluster is of kind {kind} now, and an attempt was sent to one of kind {sent_to.kind}",
                where=f"cluster {cluster}",
                hint=Moved.advice,
            )
        access = Access(cluster)  # before the user got an account
        if sent_to.login:
            access = Access(cluster, self.account(cluster, user))
            if self._described(access).login != sent_to.login:
                raise AnotherAccount(
                    f"an attempt of {user} was sent with an account that is not theirs any more",
                    where=f"cluster {cluster}: run_as",
                    hint=f"it was {sent_to}: {NoAccount.advice}",
                )
        if sent_to.root is not None and sent_to.root != (self._described(access).root or ""):
            access = access._replace(root=sent_to.root)
        hosts = dict.fromkeys(key.rpartition(" of ")[2] for key in sent_to.addresses)
        now = self.open(access).addresses(hosts) if hosts else {}
        for key, value in sent_to.addresses.items():
            if now.get(key, value) != value:
                raise Moved(
                    f"clusters.yaml has another {key} than when an attempt was sent there",
                    where=f"cluster {cluster}",
                    hint=f"it was {value}, and is {now[key]}: {Moved.advice}",
                )
        return access

    def backend_of_attempt(self, cluster: str, user: str, attempt: AttemptRecord) -> Backend:
        """Return the backend that reaches *attempt* of a job of *user*. Raises what `access` raises."""
        return self.open(self.access(cluster, user, attempt.sent_to))

    def accounts(self, cluster: str) -> list[str]:
        """Return a user for each account with which jobs run on *cluster*; "" is the user of this process.

        Each of them is one for `backend_of_user`. Users who share an account, its root and its options are one.
        Raises `LaunchError` for a cluster that is not configured.
        """
        accounts = self.backend(cluster).cluster.run_as
        if not isinstance(accounts, dict):
            return [""]
        first = {user: next(one for one in accounts if accounts[one] == accounts[user]) for user in accounts}
        own = [] if login_name() in accounts else [""]
        return [*own, *dict.fromkeys(first.values())]

    def open(self, access: Access) -> Backend:
        """Return the backend of *access*, opened once. Raises `LaunchError`."""
        if access not in self._backends:
            own = access.user or access.root is not None
            self._backends[access] = self._open_own(access) if own else self.backend_of(access.cluster)
        return self._backends[access]

    def _open_own(self, access: Access) -> Backend:
        plain = self.backend(access.cluster)
        if access.user and not plain.logs_in:
            raise SpecError(
                f"nobody logs in on clusters of kind {plain.kind}: users have no accounts there",
                where=f"cluster {access.cluster}: run_as",
                hint="write `run_as: service` if all jobs may run as the service's account",
            )
        described = self._described(access)
        if self.backend_for is not None:
            return self.backend_for(described)
        from orc.launchers.backends import open_backend

        return open_backend(described, self.state_dir)

    def _described(self, access: Access) -> Cluster:
        """Return the cluster as *access* has it."""
        cluster = self.backend(access.cluster).cluster
        if access.user:
            assert isinstance(cluster.run_as, dict)
            cluster = cluster.of_account(cluster.run_as[access.user])
        return cluster if access.root is None else cluster.at_root(access.root or None)

    def limits(self, cluster: str) -> Limits | None:
        """Return the limits of *cluster*; `None` where it has none, or is not configured any more."""
        from orc.launchers.errors import LaunchError

        try:
            limits = self.backend(cluster).cluster.limits
        except LaunchError:
            return None  # the dispatch of its jobs says what is wrong with the cluster
        return limits if any(amount is not None for _, amount in limits) else None

    def clusters_with(self, ability: type) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters of clusters.yaml whose backends have *ability*, and errors of those that fail to open.

        Contacts none. One bad entry says nothing about the others.
        """
        from orc.launchers.errors import LaunchError
        from orc.launchers.spec.clusters import read_clusters

        clusters, problems = read_clusters(self.clusters_file)
        wrong: dict[str, LaunchError] = dict(problems)
        found = []
        for name in clusters.keys() - wrong.keys():
            try:
                if isinstance(self.backend(name), ability):
                    found.append(name)
            except LaunchError as error:
                wrong[name] = error
        return sorted(found, key=list(clusters).index), wrong

    @cached_property
    def store(self) -> ContentStore:
        """The local store of code snapshots."""
        from orc.launchers.snapshot.content_store import ContentStore

        return ContentStore(store_path(self.state_dir))


class OutOfReach(RenderError):
    """Attempt, or place for one, that clusters.yaml as it is now gives no way to; an administrator may mend that."""

    advice = ""
    is_public = False  # its hint has details for who may read the configuration

    @property
    def reason(self) -> str:
        """Reason of a job that waits for that; it names no account, as others may read it."""
        return f"{self.what}; {self.advice}"


class NoAccount(OutOfReach):
    """A user has no account on a cluster."""

    advice = "an administrator has to write it below `run_as` of clusters.yaml until the job has ended"
    is_public = True


class AnotherAccount(NoAccount):
    """A user has another account on a cluster than an attempt was sent with."""

    is_public = False


class Moved(OutOfReach):
    """A machine to which an attempt was sent has another address now."""

    advice = "an administrator has to write it there again, as it was, until the job has ended"


def no_account(cluster: str, user: str) -> NoAccount:
    """Return the error for a user whose jobs have no account on *cluster*."""
    return NoAccount(
        f"jobs of {user} have no account on the cluster {cluster}",
        where=f"cluster {cluster}: run_as",
        hint=f"an administrator writes the account of {user} below `run_as` of clusters.yaml, or `run_as: service` "
        f"where everybody's jobs may run as the service's own account ({login_name()})",
    )


def store_path(state_dir: Path) -> Path:
    """Return the place of the snapshots below a state directory."""
    from orc.launchers.paths import Layout

    return Path(Layout.at(state_dir.as_posix()).store)
