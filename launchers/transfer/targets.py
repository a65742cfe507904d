"""The stores of a cluster: one for each host of an SSH cluster, one for a cluster that is entered here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from orc.launchers.errors import BundleError, LaunchError
from orc.launchers.remote.transport import LocalTransport, Transport
from orc.launchers.snapshot.gc import Collected, Request, collect

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster


@dataclass(frozen=True)
class Targets:
    """Where a cluster's snapshots go, and how."""

    roots: Mapping[str, tuple[Transport, str]]  # by host
    pythons: Mapping[str, str]
    fan_out: bool = False
    shared: bool | Literal["auto"] = False


@contextmanager
def open_targets(cluster: Cluster) -> Iterator[Targets]:
    """The targets of *cluster*, with connections that are closed at the end. Raises `LaunchError`."""
    if cluster.kind == "slurm":
        with _of_login_node(cluster) as targets:
            yield targets
        return
    if cluster.kind == "tpu":
        with _of_workers(cluster) as targets:
            yield targets
        return
    if cluster.kind != "ssh":
        assert cluster.root is not None
        yield Targets({cluster.name: (LocalTransport(), cluster.root)}, {})
        return
    from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON, read_settings
    from orc.launchers.remote.ssh.hosts import open_transports

    settings = read_settings(cluster)
    transports = open_transports(cluster)
    try:
        yield Targets(
            {name: (transport, settings.root_of(name)) for name, transport in transports.items()},
            {name: settings.python_of(name) or DEFAULT_PYTHON for name in transports},
            settings.options.fan_out,
            settings.options.shared,
        )
    finally:
        for transport in transports.values():
            transport.close()


@contextmanager
def _of_login_node(cluster: Cluster) -> Iterator[Targets]:
    """The one store of a Slurm cluster, from where it is entered."""
    from orc.launchers.backends.slurm.login import entry_python, open_transport, root_of
    from orc.launchers.backends.slurm.options import read_settings
    from orc.launchers.spec.clusters import option_place

    settings = read_settings(cluster.options, where=lambda name: option_place(cluster, (name,), key=True))
    name = settings.login.name if settings.login else cluster.name
    transport = open_transport(cluster, settings)
    try:
        root = transport.expand(root_of(cluster, settings))
        yield Targets({name: (transport, root)}, {name: entry_python(cluster, settings)} if settings.login else {})
    finally:
        transport.close()


@contextmanager
def _of_workers(cluster: Cluster) -> Iterator[Targets]:
    """The stores of the TPU that the cluster's options name; others come and go with the attempts that they are for."""
    from orc.launchers.backends.tpu.settings import read_settings
    from orc.launchers.backends.tpu.workers import worker_transports
    from orc.launchers.remote.ssh.options import DEFAULT_PYTHON

    settings = read_settings(cluster)
    if settings.options.name is None:
        raise LaunchError(
            "TPUs are made for an attempt and deleted after it: nothing of a job stays there",
            where=f"cluster {cluster.name}",
            hint="`orc prune` deletes TPUs that are left. A TPU that `name:` in the options names keeps a store.",
        )
    transports = worker_transports(cluster)
    python = cluster.python or DEFAULT_PYTHON
    try:
        yield Targets(
            {name: (transport, settings.root) for name, transport in transports.items()},
            dict.fromkeys(transports, python),
            fan_out=True,
            shared="auto",
        )
    finally:
        for transport in transports.values():
            transport.close()


def collect_garbage(targets: Targets, asked: Request) -> dict[str, Collected | LaunchError]:
    """Collect on all hosts, side by side. *asked* is for each root there."""
    from orc.launchers.remote.ssh.fanout import each

    return each({name: name for name in targets.roots}, lambda name: _collect_on(targets, name, asked))


def _collect_on(targets: Targets, host: str, asked: Request) -> Collected:
    from dataclasses import replace

    from orc.launchers.transfer.program import Conversation
    from orc.launchers.transfer.wire import inflate

    transport, root = targets.roots[host]
    asked = replace(asked, root=root)
    if isinstance(transport, LocalTransport):
        try:
            return collect(asked)
        except OSError as error:
            raise BundleError(f"cannot collect: {error.strerror or error}", where=error.filename or root) from None
    with Conversation(transport, host, python=targets.pythons.get(host, "python3"), collecting=True) as talk:
        answer = talk.ask("collect", **asked.to_dict())
        talk.tell("bye")
        return Collected.from_dict(json.loads(inflate(answer.body)))
