"""Options of a cluster of hosts, those of a job for it, and the files that list hosts. Mistakes are named by place.

Such files are hostfiles of MPI (``node1 slots=4``, ``node1:4``) and INI inventories (``[group]``, ``node1
ansible_host=...``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from orc.launchers.errors import SpecError
from orc.launchers.paths import refuse_untrusted
from orc.launchers.remote.ssh.options import DEFAULT_PYTHON as DEFAULT_PYTHON
from orc.launchers.remote.ssh.options import DEFAULT_ROOT as DEFAULT_ROOT
from orc.launchers.remote.ssh.options import HostName, Machine, SshOptions, UserName, host_name, refuse_home
from orc.launchers.spec import grammar
from orc.launchers.spec.options import (
    Argument,
    Flag,
    FrozenModel,
    Number,
    PathText,
    Reader,
    Whole,
    seconds,
    several,
    validate_options,
)

if TYPE_CHECKING:
    from orc.launchers.remote.ssh.routes import ConnectOptions, HostSpec
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.source import Document

Slots = Annotated[Whole, Field(ge=0, le=4096)]
Labels = Annotated[tuple[Argument, ...], several]


def _names(value: Any) -> str:
    """Return a name, or a range of names."""
    text = grammar.scalar_text(value).strip()
    for name in expand(text):
        host_name(name)
    return text


class Host(Machine):
    """Host in clusters.yaml. What is `None` is the cluster's, and then that of ``~/.ssh/config``."""

    name: Annotated[str, Reader(_names, str)] = Field(description="What it is called here, and in ~/.ssh/config.")
    slots: Slots | None = Field(None, description="Processes (or GPUs) for jobs; 0: one job at a time.")
    labels: Labels = Field((), description="What jobs can ask for.")
    root: PathText | None = Field(None, description="orc's files there.")


def expand(name: str) -> list[str]:
    """Return ``node[01-03]`` (or ``node[01:03]``) as three names; any other name as itself. Raises `ValueError`."""
    match = re.fullmatch(r"([^\[\]]*)\[([0-9]+)[-:]([0-9]+)\]([^\[\]]*)", name)
    if not match:
        return [name]
    first, last = int(match[2]), int(match[3])
    if not first <= last <= first + 10_000:
        raise ValueError(f"{name!r}: {match[2]} to {match[3]} is no range of hosts")
    return [f"{match[1]}{number:0{len(match[2])}d}{match[4]}" for number in range(first, last + 1)]


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
        hint = "List them under `options:`, as in  hosts: [node1, node2]  or give a `hostfile`."
        raise SpecError(f"the cluster {cluster.name} has no hosts", where=document.where, hint=hint)
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
            hint = "Give a host `slots` when several processes may run on it."
            raise SpecError(f"hosts: {host.name} is listed twice", where=document.origin(("hosts",)).where, hint=hint)
        seen.add(host.name)


# -- files that list hosts

# The variables of an inventory, and what the common hostfiles call the same.
_KEYS = {
    "ansible_host": "address",
    "ansible_ssh_host": "address",
    "hostname": "address",
    "ansible_user": "user",
    "ansible_ssh_user": "user",
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_python_interpreter": "python",
    "label": "labels",
    "max_slots": "slots",
    "max-slots": "slots",
}
_KNOWN = ("address", "user", "port", "slots", "labels", "python", "root", "via")


def read_hostfile(path: str, where: str) -> list[Host]:
    """Return the hosts in the file, in its order; groups of an inventory become labels. *where* names the file first.

    Raises `SpecError` with file and line.
    """
    file = Path(path).expanduser()
    refuse_untrusted(file, "hostfile", SpecError)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"hostfile: {file} cannot be read: {error.strerror}", where=where) from None
    except UnicodeDecodeError:
        raise SpecError(f"hostfile: {file} is not UTF-8 text", where=where) from None
    return parse_hostfile(text, str(file))


def parse_hostfile(text: str, name: str) -> list[Host]:
    """Return the hosts in *text*, which is called *name* in messages. Raises `SpecError`."""
    hosts: dict[str, Host] = {}
    group = ""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise SpecError(f"not a line of a hostfile: {error}", where=where) from None
        if not words:
            continue
        if heading := re.fullmatch(r"\[([^\[\]]+)\]", line.split("#")[0].split(";")[0].strip()):
            group = heading[1]
        elif group.endswith((":vars", ":children")) or words[0].startswith(";"):
            # Variables of groups and groups of groups are Ansible's own; the hosts stand elsewhere.
            continue
        else:
            for host in _hosts(words, group, where):
                before = hosts.get(host.name)
                hosts[host.name] = _joined(before, host, where) if before else host
    return list(hosts.values())


def _hosts(words: list[str], group: str, where: str) -> list[Host]:
    first, *settings = words
    data: dict[str, object] = {"labels": [group] if group and group not in ("all", "ungrouped") else []}
    if count := re.fullmatch(r"([^:\[\]]+):([0-9]+)", first):  # MPICH; an IPv6 address has more colons
        first, data["slots"] = count[1], int(count[2])
    for pair in settings:
        key, equals, value = pair.partition("=")
        known = _KEYS.get(key, key)
        if known not in _KNOWN:
            if key.startswith("ansible_"):
                continue  # how Ansible does its work says nothing about the host
            from orc.launchers.spec.problems import choose

            raise SpecError(f"unknown key {key!r}{choose(key, _KNOWN)}", where=where)
        if not equals:
            raise SpecError(f"{key}: expected {key}=value", where=where)
        if known == "labels":
            data["labels"] = [*_list(data["labels"]), *value.split(",")]
        elif known in ("slots", "port"):
            if not value.isdigit():
                raise SpecError(f"{key}: {value!r} is not a whole number", where=where)
            data[known] = int(value)
        else:
            data[known] = value
    user, _, bare = first.rpartition("@")
    if user:
        data["user"] = user
    try:
        return [Host.model_validate({**data, "name": name}) for name in expand(bare)]
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        what = str(first_error.get("ctx", {}).get("error") or first_error["msg"])
        raise SpecError(f"{'.'.join(str(part) for part in first_error['loc'])}: {what}", where=where) from None
    except ValueError as error:
        raise SpecError(str(error), where=where) from None


def _list(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _joined(before: Host, again: Host, where: str) -> Host:
    """Return each host once: one that stands in several groups of an inventory has all their labels."""
    data = before.model_dump()
    for key, value in again.model_dump(exclude_defaults=True).items():
        if key == "labels":
            data[key] = (*before.labels, *(label for label in again.labels if label not in before.labels))
        elif data[key] in (None, value):
            data[key] = value
        else:
            raise SpecError(f"{again.name}: {key} is {value} here and {data[key]} above", where=where)
    return Host.model_validate(data)
