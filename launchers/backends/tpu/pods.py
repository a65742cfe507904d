"""TPUs that are up, as hosts of the ssh backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from orc.launchers.backends.base import Snapshot
from orc.launchers.backends.ssh.rendering import hosts_of
from orc.launchers.backends.tpu.rendering import on_workers
from orc.launchers.backends.tpu.workers import directory_of, ssh_cluster
from orc.launchers.errors import BackendError

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.backends.ssh import SshBackend
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.backends.tpu.lifecycle import Node
    from orc.launchers.backends.tpu.settings import Settings
    from orc.launchers.backends.tpu.workers import Workers
    from orc.launchers.plan import Plan
    from orc.launchers.spec.clusters import Cluster


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
        from orc.launchers.backends.tpu.workers import open_workers

        return open_workers(self._api(), self._settings, node, directory_of(self._cluster, node.id, self._state_dir))

    def hosts(self, workers: Workers) -> SshBackend:
        """Return machines as hosts; connects to none."""
        from orc.launchers.backends.ssh import SshBackend

        names = [machine.name for machine in workers.machines]
        inner = ssh_cluster(self._cluster, self._settings, names, workers.ssh_config)
        return SshBackend(inner, state_dir=self._state_dir)

    def start(self, node: Node, plan: Plan, secrets: Mapping[str, str]) -> None:
        """Stage the snapshot on the workers of *node*, and start the agents; running ones are left as they are."""
        from orc.launchers.paths import state_dir
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
