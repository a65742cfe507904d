"""Options of a cluster of hosts, and those of a job for it. Checked once; mistakes are named by place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from orc.launchers.backends.ssh.hostfile import Host, Labels, Slots, expand, read_hostfile
from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.options import DEFAULT_PYTHON as DEFAULT_PYTHON
from orc.launchers.remote.ssh.options import DEFAULT_ROOT as DEFAULT_ROOT
from orc.launchers.remote.ssh.options import HostName, SshOptions, UserName, refuse_home
from orc.launchers.spec.options import Flag, FrozenModel, Number, PathText, Whole, seconds, several, validate_options

if TYPE_CHECKING:
    from orc.launchers.remote.ssh.routes import ConnectOptions, HostSpec
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.source import Document

HostNames = Annotated[tuple[HostName, ...], several]


class Options(SshOptions):
    """``options:`` of a cluster of kind ssh."""

    hosts: Annotated[tuple[Host, ...], several] = Field((), description="The machines, in order of use.")
    hostfile: PathText | None = Field(None, description="More of them: an MPI hostfile or inventory.")
    slots: Slots = Field(0, description="Of hosts that say nothing; 0: one job at a time.")
    user: UserName | None = Field(None, description="Who logs in.")
    peer_timeout: Annotated[Number, seconds(2, 3600)] = Field(30.0, description="Silence after which a node is lost.")
    preflight: Flag = Field(True, description="Probe the hosts before each attempt.")
    shared: Flag | Literal["auto"] = Field("auto", description="Whether the hosts share the root's file system.")
    sudo: Flag = Field(False, description="Run everything on the hosts as root, with sudo.")

    @property
    def access(self) -> ConnectOptions:
        """The same for transports."""
        return replace(super().access, sudo=self.sudo)


class JobOptions(FrozenModel):
    """``resources.options.ssh`` of a job."""

    hosts: HostNames = Field((), description="Only these, in this order.")
    labels: Labels = Field((), description="Only hosts that have all of these.")
    exclude: HostNames = Field((), description="Not these.")
    slots: Annotated[Whole, Field(ge=1, le=4096)] | None = Field(None, description="Slots to take on each host.")


@dataclass(frozen=True)
class Settings:
    """Settings of a cluster of hosts: its options, and its hosts with the cluster's defaults filled in."""

    options: Options
    hosts: tuple[Host, ...]
    root: str
    python: str | None  # of the ranks; `None`: whatever runs the agent

    def host(self, name: str) -> Host:
        """Return the host of that name. Raises `KeyError`."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names, in the order of the file."""
        return tuple(host.name for host in self.hosts)

    def root_of(self, name: str) -> str:
        """Return orc's directory on that host; may begin with ``~``."""
        return self.host(name).root or self.root

    def spec(self, name: str) -> HostSpec:
        """Return the address of that host and the way to it."""
        return self.host(name).spec(self.python)

    def python_of(self, name: str) -> str | None:
        """Return the interpreter of ranks that is configured for that host."""
        return self.host(name).python or self.python


def read_settings(cluster: Cluster) -> Settings:
    """Return the settings of *cluster*, its hostfile included. Raises `SpecError` with every mistake and its place."""
    from orc.launchers.spec.clusters import options_document

    document = options_document(cluster)
    options = validate_options(Options, cluster.options, document.where)
    hosts = _expanded(options.hosts)
    if options.hostfile is not None:
        hosts += read_hostfile(options.hostfile, document.origin(("hostfile",)).where)
    if not hosts:
        raise SpecError(
            f"the cluster {cluster.name} has no hosts",
            where=document.where,
            hint="List them under `options:`, as in  hosts: [node1, node2]  or give a `hostfile`.",
        )
    _refuse_doubles(hosts, document)
    for python in (cluster.python, *(host.python for host in hosts)):
        refuse_home(python, options.sudo, document.where)
    given = cluster.root or DEFAULT_ROOT
    completed = tuple(_completed(host, options) for host in hosts)
    if cluster.login is not None:
        # A root of its own on a host is that of the account which is configured for it.
        own = {"user": cluster.login, "root": None}
        completed = tuple(host.model_copy(update=own) for host in completed)
    return Settings(options, completed, given.rstrip("/") or "/", cluster.python)


def read_job_options(job: JobSpec, settings: Settings) -> JobOptions:
    """Return the job's options for its hosts. Raises `SpecError`."""
    from orc.launchers.spec.source import document_of

    given = job.resources.options.get("ssh", {})
    document = document_of(given, f"{job.name}: resources.options.ssh")
    options = validate_options(JobOptions, given, document.where)
    for key in ("hosts", "exclude"):
        for number, name in enumerate(getattr(options, key)):
            if name not in settings.names:
                from orc.launchers.spec.problems import choose

                where = document.origin((key, number)).where
                raise SpecError(f"{key}: no host {name!r} in the cluster{choose(name, settings.names)}", where=where)
    labels = sorted({label for host in settings.hosts for label in host.labels})
    for number, label in enumerate(options.labels):
        if label not in labels:
            from orc.launchers.spec.problems import choose

            known = choose(label, labels) if labels else "; the cluster's hosts have no labels"
            where = document.origin(("labels", number)).where
            raise SpecError(f"labels: no host has the label {label!r}{known}", where=where)
    return options


def _expanded(hosts: Sequence[Host]) -> list[Host]:
    return [
        host.model_copy(update={"name": name}) if name != host.name else host
        for host in hosts
        for name in expand(host.name)
    ]


def _completed(host: Host, options: Options) -> Host:
    given = {"user": options.user, "slots": options.slots}
    missing = {key: value for key, value in given.items() if getattr(host, key) is None and value is not None}
    return host.model_copy(update=missing) if missing else host


def _refuse_doubles(hosts: Sequence[Host], document: Document) -> None:
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise SpecError(
                f"hosts: {host.name} is listed twice",
                where=document.origin(("hosts",)).where,
                hint="Give a host `slots` when several processes may run on it.",
            )
        seen.add(host.name)
