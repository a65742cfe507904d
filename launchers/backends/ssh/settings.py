"""The hosts of a cluster of kind ssh, and what a job may say about them. Checked once; mistakes are named by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic_core import ValidationError
from pydantic_core import core_schema as cs

from orc.launchers.backends.ssh.hostfile import SLOTS, Host, expand, read_hostfile
from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.options import DEFAULT_PYTHON as DEFAULT_PYTHON
from orc.launchers.remote.ssh.options import DEFAULT_ROOT as DEFAULT_ROOT
from orc.launchers.remote.ssh.options import (
    Reaching,
    host_name,
    maybe,
    path,
    read,
    seconds,
    several,
    user_name,
    word,
)
from orc.launchers.spec.model import Model, fields, model, setting

if TYPE_CHECKING:
    from orc.launchers.remote.ssh.hosts import HostSpec
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.source import Document, KeyPath


@model
class Options(Reaching):
    """``options:`` of a cluster of kind ssh."""

    hosts: tuple[Host, ...] = setting(
        cs.tuple_schema([Host.core_schema], variadic_item_index=0), default=(), doc="The machines, in order of use."
    )
    hostfile: str | None = setting(maybe(read(path)), default=None, doc="More of them: an MPI hostfile or inventory.")
    slots: int = setting(SLOTS, default=0, doc="Of hosts that say nothing; 0: one job at a time.")
    user: str | None = setting(maybe(read(user_name)), default=None, doc="Who logs in.")
    peer_timeout: float = setting(seconds(2, 3600), default=30.0, doc="Silence after which a node is lost.")
    preflight: bool = setting(cs.bool_schema(strict=True), default=True, doc="Probe the hosts before each attempt.")
    fan_out: bool = setting(cs.bool_schema(strict=True), default=True, doc="Hosts pass snapshots on to each other.")
    shared: bool | Literal["auto"] = setting(
        cs.union_schema([cs.bool_schema(strict=True), cs.literal_schema(["auto"])]),
        default="auto",
        doc="Whether the hosts share the root's file system.",
    )


@model
class JobOptions(Model):
    """``resources.options.ssh`` of a job."""

    hosts: tuple[str, ...] = setting(several(read(host_name)), default=(), doc="Only these, in this order.")
    labels: tuple[str, ...] = setting(several(read(word)), default=(), doc="Only hosts that have all of these.")
    exclude: tuple[str, ...] = setting(several(read(host_name)), default=(), doc="Not these.")
    slots: int | None = setting(
        maybe(cs.int_schema(ge=1, le=4096, strict=True)), default=None, doc="Slots to take on each host."
    )


@dataclass(frozen=True)
class Settings:
    """A cluster of kind ssh: its options, and its hosts with the cluster's defaults filled in."""

    options: Options
    hosts: tuple[Host, ...]
    root: str
    python: str | None  # of the ranks; `None`: whatever runs the agent

    def host(self, name: str) -> Host:
        """The host of that name. Raises `KeyError`."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names, in the order of the file."""
        return tuple(host.name for host in self.hosts)

    def root_of(self, name: str) -> str:
        """orc's directory on that host; may begin with ``~``."""
        return self.host(name).root or self.root

    def spec(self, name: str) -> HostSpec:
        """How that host is reached."""
        return self.host(name).spec(self.python)

    def python_of(self, name: str) -> str | None:
        """The interpreter of ranks that is configured for that host."""
        return self.host(name).python or self.python


def read_settings(cluster: Cluster) -> Settings:
    """The settings of *cluster*, its hostfile included. Raises `SpecError` that lists every mistake with its place."""
    from orc.launchers.spec.clusters import options_document

    document = options_document(cluster)
    options = cast(Options, _validate(Options, cluster.options, document))
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
    given = cluster.root or DEFAULT_ROOT
    return Settings(
        options, tuple(_completed(host, options) for host in hosts), given.rstrip("/") or "/", cluster.python
    )


def read_job_options(job: JobSpec, settings: Settings) -> JobOptions:
    """What the job says about its hosts. Raises `SpecError`."""
    from orc.launchers.spec.source import document_of

    document = document_of(job.resources.options.get("ssh", {}), f"{job.name}: resources.options.ssh")
    options = cast(JobOptions, _validate(JobOptions, document.data, document))
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


def _validate(kind: type[Model], data: Mapping[str, Any], document: Document) -> Model:
    try:
        return kind.model_validate(_ranges(dict(data)))
    except ValidationError as error:
        from orc.launchers.spec.problems import SpecProblems, choose, translate

        def suggest(path: KeyPath, name: str) -> str:
            return choose(name, [field.name for field in fields(Host if path[:1] == ("hosts",) and path[1:] else kind)])

        raise SpecProblems(translate(error, document, suggest)) from None


def _ranges(data: dict[str, Any]) -> dict[str, Any]:
    """``hosts: node1`` is short for a list of one."""
    return {**data, "hosts": [data["hosts"]]} if isinstance(data.get("hosts"), (str, Mapping)) else data


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
