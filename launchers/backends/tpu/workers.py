"""Worker machines of TPUs, as hosts of the ssh backend: addresses from the node, host keys from guest attributes.

The machines of a new TPU are new to everyone: their keys are in no file of the user's. The service passes on what each
machine says about itself (guest attributes ``hostkeys/``); those keys are trusted, and no others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.agent.config import AgentConfig
from orc.launchers.agent.records import read_json
from orc.launchers.attempts.agent_config import agent_file
from orc.launchers.backends.base import Snapshot
from orc.launchers.backends.ssh.rendering import hosts_of
from orc.launchers.backends.tpu.request import API
from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.paths import state_dir
from orc.launchers.plan import Plan
from orc.launchers.remote import files
from orc.launchers.spec.clusters import Cluster

if TYPE_CHECKING:
    from orc.launchers.backends.ssh import SshBackend
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.backends.tpu.lifecycle import Node
    from orc.launchers.backends.tpu.settings import Options, Settings

_KEY_TYPE, _KEY = r"[a-z0-9][a-z0-9@.-]*", r"[A-Za-z0-9+/]+={0,2}"


def worker_name(number: int) -> str:
    """Return the name of the worker *number* among those of its TPU."""
    return f"worker-{number}"


@dataclass(frozen=True)
class Worker:
    """Machine of a TPU."""

    name: str
    address: str  # by which it is reached from here
    internal: str  # by which its peers reach it


@dataclass(frozen=True)
class Workers:
    """Machines of one TPU in order, and the files for logging in to them."""

    machines: tuple[Worker, ...]
    ssh_config: str


def workers_of(node: Node, options: Options) -> tuple[Worker, ...]:
    """Return the machines of *node*, with external addresses unless there are none or internal ones are wanted."""
    return tuple(
        Worker(worker_name(number), external if external and not options.internal else internal, internal)
        for number, (internal, external) in enumerate(node.addresses)
    )


def open_workers(api: TpuApi, settings: Settings, node: Node, directory: Path) -> Workers:
    """Return the workers of *node*, which is up; the files for logging in to them are written to *directory*.

    The API is asked for host keys once for each node. Raises `BackendUnreachable` while some have not been published.
    """
    machines = workers_of(node, settings.options)
    if not machines:
        raise BackendUnreachable("the TPU has no addresses yet", where=node.name)
    known = directory / "workers.json"
    config = directory / "ssh_config"
    this = {"name": node.name, "serial": node.serial, "created_at": node.created_at}
    this["machines"] = [asdict(machine) for machine in machines]
    if read_json(str(known)) != this or not config.exists():
        keys = api.host_keys(node)
        for machine, own in zip(machines, keys, strict=True):
            if not _plain(own):
                what = f"{machine.name} has not published its host keys yet"
                hint = "They are guest attributes: does the project or the metadata forbid enable-guest-attributes?"
                raise BackendUnreachable(what, where=node.name, hint=hint)
        _write(directory / "known_hosts", known_hosts(node, machines, keys))
        _write(config, ssh_config(node, machines, settings.options, directory / "known_hosts"))
        _write(known, json.dumps(this))
    return Workers(machines, str(config))


def saved_workers(directory: Path) -> Workers:
    """Return the workers as they were last time, without any call. Raises `BackendError` when there were none."""
    known = read_json(str(directory / "workers.json"))
    if known is None:
        raise BackendError("its TPU has not come up yet", hint="`orc status` shows what it waits for.")
    return Workers(tuple(Worker(**machine) for machine in known["machines"]), str(directory / "ssh_config"))


def known_hosts(node: Node, machines: Sequence[Worker], keys: Sequence[Mapping[str, str]]) -> str:
    """Return the text of a known_hosts file."""
    lines = [
        f"{_alias(node, machine)} {kind} {key}"
        for machine, own in zip(machines, keys, strict=True)
        for kind, key in sorted(_plain(own).items())
    ]
    return "".join(f"{line}\n" for line in lines)


def ssh_config(node: Node, machines: Sequence[Worker], options: Options, known: Path) -> str:
    """Return an SSH configuration with the workers' names; the user's own counts for all the rest."""
    known_file = str(known).replace("%", "%%")
    common = [
        f"User {options.user}" if options.user else "",
        f"Port {options.port}",
        f'IdentityFile "{os.path.expanduser(options.ssh_key)}"' if options.ssh_key else "",  # noqa: PTH111
        "IdentitiesOnly yes" if options.ssh_key else "",
        f"ProxyJump {options.via}" if options.via else "",
        # The second one keeps paramiko from taking the quotes off, and the path apart at its blanks.
        f'UserKnownHostsFile "{known_file}" /dev/null',
        "GlobalKnownHostsFile none",
        "StrictHostKeyChecking yes",
    ]
    lines = ["# Made by orc for one TPU."]
    for machine in machines:
        lines += [f"Host {machine.name}", f"  HostName {machine.address}", f"  HostKeyAlias {_alias(node, machine)}"]
        lines += [f"  {line}" for line in common if line]
    own = options.ssh_config or os.environ.get("ORC_SSH_CONFIG")
    others = (own,) if own else ("~/.ssh/config", "/etc/ssh/ssh_config")
    lines += ["Host *", *(f'  Include "{os.path.expanduser(other)}"' for other in others)]  # noqa: PTH111
    return "".join(f"{line}\n" for line in lines)


def ssh_cluster(cluster: Cluster, settings: Settings, names: Sequence[str], config: str | None = None) -> Cluster:
    """Return the workers as a cluster of kind ssh."""
    options = settings.options
    return Cluster(
        name=cluster.name,
        kind="ssh",
        root=settings.root,
        python=cluster.python,
        env=cluster.env,
        setup=cluster.setup,
        options={
            "hosts": list(names),
            "preflight": False,
            "connect_timeout": options.connect_timeout,
            "peer_timeout": options.peer_timeout,
            **({"ssh_config": config} if config else {}),
            **({"sudo": True} if options.sudo else {}),
        },
    )


def find_node(api: TpuApi, settings: Settings) -> Node:
    """Return the TPU that the options name, which is up, in the first zone that has it. Raises `BackendError`."""
    wanted = settings.options.name
    assert wanted is not None  # the caller has looked
    for zone in settings.options.zones:
        node = api.node(zone, wanted)
        if node is None:
            continue
        if node.state != "READY":
            raise BackendError(f"the TPU {wanted} is not up: it is {node.state}", where=node.name)
        return node
    zones = ", ".join(settings.options.zones)
    raise BackendError(f"there is no TPU {wanted} in {zones}", where=settings.options.project)


def directory_of(cluster: Cluster, name: str, state: Path | None) -> Path:
    """Return this machine's directory for one TPU, or for an attempt on one; *state* is the state directory."""
    return (state or state_dir()) / "tpu" / cluster.name / name


def _alias(node: Node, machine: Worker) -> str:
    """Return a name for its host key that no other machine has: addresses are reused."""
    return f"{node.id}-{machine.name}".lower()


def _plain(keys: Mapping[str, str]) -> dict[str, str]:
    """Return the well-formed keys: a machine's own words are written to a file here."""
    return {k: v.strip() for k, v in keys.items() if re.fullmatch(_KEY_TYPE, k) and re.fullmatch(_KEY, v.strip())}


def _write(path: Path, text: str) -> None:
    files.write_file(str(path), text.encode(), 0o600)


def on_workers(plan: Plan, workers: Workers) -> Plan:
    """Return the part of *plan* that is done on the workers, with their names."""
    internal = {machine.name: machine.internal for machine in workers.machines}
    made = []
    for file in plan.files:
        if file.host == API:
            continue
        config = json.loads(file.content)
        for host in config["hosts"]:
            host["address"] = internal[host["name"]]
        made.append(replace(file, content=agent_file(AgentConfig(config)).content))
    return replace(plan, backend="ssh", files=tuple(made))


class Pods:
    """Pods of one cluster that were used so far, with the connections to them."""

    def __init__(self, cluster: Cluster, settings: Settings, state_dir: Path | None, api: Callable[[], TpuApi]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._state_dir = state_dir
        self._api = api
        self._inner: dict[tuple[str, int], SshBackend] = {}  # by the id and the number of the node

    def close(self) -> None:
        """Close all connections; they are made anew when they are needed again."""
        for inner in list(self._inner.values()):
            inner.close()
        self._inner.clear()

    def known(self, name: str) -> SshBackend | None:
        """Return the hosts of the pod called *name*, if it was used before; contacts nothing."""
        found = [inner for (known, _), inner in list(self._inner.items()) if known == name]
        return found[-1] if found else None

    def on(self, node: Node) -> SshBackend:
        """Return the workers of *node*, which is up, as hosts. Raises `BackendUnreachable` while they cannot be."""
        if (node.id, node.serial) not in self._inner:
            self._inner[node.id, node.serial] = self.hosts(self.workers(node))
        return self._inner[node.id, node.serial]

    def workers(self, node: Node) -> Workers:
        """Return the workers of *node*; see `open_workers`."""
        return open_workers(self._api(), self._settings, node, directory_of(self._cluster, node.id, self._state_dir))

    def hosts(self, workers: Workers) -> SshBackend:
        """Return machines as hosts; connects to none."""
        from orc.launchers.backends.ssh import SshBackend

        names = [machine.name for machine in workers.machines]
        inner = ssh_cluster(self._cluster, self._settings, names, workers.ssh_config)
        return SshBackend(inner, state_dir=self._state_dir)

    def start(self, node: Node, plan: Plan, secrets: Mapping[str, str]) -> None:
        """Stage the snapshot on the workers of *node*, and start the agents; running ones are left as they are."""
        from orc.launchers.snapshot.content_store import ContentStore

        workers = self.workers(node)
        wanted = hosts_of(plan)
        if len(workers.machines) != len(wanted):
            has = f"{len(workers.machines)} workers"
            raise BackendError(f"the TPU has {has}, and the job was made for {len(wanted)}", where=node.name)
        store, trees = ContentStore((self._state_dir or state_dir()) / "store"), plan.trees
        environment = store.load(trees["environment"]) if "environment" in trees else None
        snapshot = Snapshot(store.load(trees["code"]), store.load(trees["runtime"]), environment)
        inner, made = self.on(node), on_workers(plan, workers)
        inner.stage(snapshot, made)
        inner.submit(made, secrets)
