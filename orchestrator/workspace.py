"""Workspace of the orchestrator: ledger, clusters, local store, clock. Passed explicitly."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import RenderError, SpecError
from orc.launchers.ids import new_job_id
from orc.orchestrator.engine.claims import Owner, abandon
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.store import Ledger

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend
    from orc.launchers.errors import LaunchError
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster, Limits


def login_name() -> str:
    """Return the name of the effective user; the number where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


@dataclass
class Workspace:
    """Orchestrator of one user, for one thread. `backend_of` opens the backend of a named cluster."""

    state_dir: Path
    ledger: Ledger
    backend_of: Callable[[str], Backend]
    backend_for: Callable[[Cluster], Backend] | None = None  # that of a cluster as a user's account has it
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    owner: str = field(default_factory=lambda: str(Owner.new()))
    user: str = field(default_factory=login_name)  # whose the new jobs are
    seals: bool = False  # secrets of new jobs are kept as ciphertext in the ledger, not in a file
    new_job_id: Callable[[str], str] = new_job_id  # from the job's name
    subscribed: Callable[[JobSpec], JobSpec] = lambda spec: spec  # with whom the settings tell of every job
    on_live_job: Callable[[], None] = lambda: None  # called as soon as a new job is durable
    noted: dict[str, float] = field(default_factory=dict)  # by job: when the ledger was last told that it was seen
    # What is read from specifications, which never change, by job; and head starts by cluster, with their age.
    gpus: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    head_starts: dict[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)
    candidates: dict[str, frozenset[str]] = field(default_factory=dict)  # hosts that a job could run on
    spent: tuple[float, Mapping[tuple[str, str], float]] | None = None  # by users and projects, with its age
    _backends: dict[tuple[str, str], Backend] = field(default_factory=dict)

    @cached_property
    def origin(self) -> str:
        """``host:directory`` of this orchestrator's snapshots and secrets: others that share the ledger have theirs."""
        return f"{os.uname().nodename}:{self.state_dir.absolute()}"

    def give_back(self, job_id: str) -> None:
        """Give the claim on a job back. Where the ledger cannot be told, this process goes on without waiting for it.

        Raises `LedgerError`.
        """
        try:
            self.ledger.release(job_id, self.owner)
        except LedgerError:
            abandon(self.owner)
            self.owner = str(Owner.new())
            raise

    def backend(self, cluster: str) -> Backend:
        """Return the backend of *cluster*, opened once. Raises `LaunchError` for a cluster that is not configured.

        It reaches the cluster as whoever runs this process. What concerns jobs goes through `backend_of_user`.
        """
        return self._opened(cluster, "")

    def backend_of_user(self, cluster: str, user: str) -> Backend:
        """Return the backend of *cluster* for jobs of *user*: it reaches the cluster with the account of that user.

        Raises `LaunchError` for a cluster that is not configured, or where the user has no account.
        """
        return self._opened(cluster, self.account(cluster, user))

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

    def sent_as(self, cluster: str, user: str) -> str:
        """Return the account that jobs of *user* are sent with now, as attempts remember it; "" for whoever runs this
        process. Raises what `account` raises.
        """
        accounts = self.backend(cluster).cluster.run_as
        name = self.account(cluster, user)
        return (
            f"{accounts[name].user} {accounts[name].root or ''}".strip() if name and isinstance(accounts, dict) else ""
        )

    def account_of_attempt(self, cluster: str, user: str, handle: Mapping[str, Any]) -> str:
        """Return the user of `backend_of_user` with whose account the attempt of *handle* was sent, a job's of *user*.

        With any other one it would not be found, and count as lost while it runs. Raises `LaunchError` where `run_as`
        does not have that account for the user any more.
        """
        sent_as = handle.get("account", "")
        if not sent_as:  # before the user got an account
            return ""
        if self.sent_as(cluster, user) != sent_as:
            raise NoAccount(
                f"an attempt of {user} was sent with the account {sent_as}, which is not theirs any more",
                where=f"cluster {cluster}: run_as",
                hint="give it back to them until their jobs have ended",
            )
        return self.account(cluster, user)

    def backend_of_attempt(self, cluster: str, user: str, handle: Mapping[str, Any]) -> Backend:
        """Return the backend that reaches the attempt of *handle*. Raises what `account_of_attempt` raises."""
        return self._opened(cluster, self.account_of_attempt(cluster, user, handle))

    def accounts(self, cluster: str) -> list[str]:
        """Return a user for each account with which jobs run on *cluster*; "" is whoever runs this process.

        Each of them is one for `backend_of_user`. Users who share an account, its root and its options are one.
        Raises `LaunchError` for a cluster that is not configured.
        """
        accounts = self.backend(cluster).cluster.run_as
        if not isinstance(accounts, dict):
            return [""]
        first = {user: next(one for one in accounts if accounts[one] == accounts[user]) for user in accounts}
        own = [] if login_name() in accounts else [""]
        return [*own, *dict.fromkeys(first.values())]

    def _opened(self, cluster: str, user: str) -> Backend:
        key = cluster, user
        if key not in self._backends:
            self._backends[key] = self._of_account(cluster, user) if user else self.backend_of(cluster)
        return self._backends[key]

    def _of_account(self, cluster: str, user: str) -> Backend:
        plain = self.backend(cluster)
        if not plain.logs_in:
            raise SpecError(
                f"nobody logs in on clusters of kind {plain.kind}, so that users have no accounts of their own there",
                where=f"cluster {cluster}: run_as",
                hint="write `run_as: service` where everybody's jobs may run as the service's account",
            )
        accounts = plain.cluster.run_as
        assert isinstance(accounts, dict)
        described = plain.cluster.of_account(accounts[user])
        if self.backend_for is not None:
            return self.backend_for(described)
        from orc.launchers.backends import open_backend

        return open_backend(described, self.state_dir)

    def limits(self, cluster: str) -> Limits | None:
        """Return the limits of *cluster*; `None` where it has none, or is not configured any more."""
        from orc.launchers.errors import LaunchError

        try:
            limits = self.backend(cluster).cluster.limits
        except LaunchError:
            return None  # its jobs' turn says what is wrong with the cluster
        return limits if any(amount is not None for _, amount in limits) else None

    def clusters_with(self, ability: type) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters of clusters.yaml whose backends have *ability*, and errors of those that fail to open.

        Contacts none. One bad entry says nothing about the others.
        """
        from orc.launchers.errors import LaunchError
        from orc.launchers.spec.clusters import read_clusters

        clusters, problems = read_clusters()
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


class NoAccount(RenderError):
    """A user has no account on a cluster, or another than an attempt was sent with. An administrator may mend it."""


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
    from orc.launchers.layout import Layout

    return Path(Layout.at(state_dir.as_posix()).store)
