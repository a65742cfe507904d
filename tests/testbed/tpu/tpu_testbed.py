"""Fixtures: `tpu_api` (the API server of this directory), `tpu_cluster` (orc's view of it), `tpu_pods` (with workers).

The workers of `tpu_pods` are hosts of the hosts testbed: a TPU with *n* machines takes the first *n* that are free, and
gives them back empty, with nothing running. Their host keys are guest attributes, as on the real service.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hosts_testbed import USER, HostsTestbed, eventually

if TYPE_CHECKING:  # it imports Google's client library, which most tests do without
    from fake_tpu_model import WorkerEvent
    from fake_tpu_server import FakeTpuServer

PROJECT = "demo-project"
ZONE, OTHER_ZONE = "us-central2-b", "europe-west4-a"
_ANYWHERE = f"projects/{PROJECT}/locations/-"
# A cloud in a hurry.
QUICK = {
    "provision_delay": 0.1,
    "accept_delay": 0.02,
    "queue_delay": 0.02,
    "delete_delay": 0.05,
    "suspend_delay": 0.1,
}


@pytest.fixture
def tpu_api() -> Iterator[FakeTpuServer]:
    """The TPU API of an empty project, in which everything goes quickly."""
    from fake_tpu_model import Settings
    from fake_tpu_server import FakeTpuServer

    with FakeTpuServer(Settings(**QUICK)) as server:  # type: ignore[arg-type]
        yield server


def cluster_of(server: FakeTpuServer, *, root: str | None = None, **options: Any) -> Any:
    """An orc `Cluster` called pod; *options* go into its ``options:``."""
    from orc.launchers.spec.clusters import Cluster

    return Cluster(
        name="pod",
        kind="tpu",
        root=root,
        python=sys.executable,
        options={
            "project": PROJECT,
            "zones": [ZONE],
            "accelerator_type": "v4",
            "endpoint": server.address,
            "insecure": True,
            **options,
        },
    )


@pytest.fixture
def tpu_cluster(tpu_api: FakeTpuServer) -> Callable[..., Any]:
    """``tpu_cluster(zones=[...], ...)``: a cluster of kind tpu at `tpu_api`."""
    return lambda **options: cluster_of(tpu_api, **options)


@dataclass
class Pods:
    """An API whose TPUs have real machines."""

    api: FakeTpuServer
    hosts: HostsTestbed

    def cluster(self, **options: Any) -> Any:
        """An orc `Cluster` for them, which logs in with a key in the metadata."""
        own = {"ssh_key": str(self.hosts.identity), "user": USER, "peer_timeout": 60}
        return cluster_of(self.api, root=f"/home/{USER}/orc", **{**own, **options})

    @property
    def nodes(self) -> dict[str, str]:
        """The states of all TPUs, by their names."""
        found: dict[str, str] = self.api.cloud.summary()["nodes"]
        return found

    @property
    def queued(self) -> dict[str, str]:
        """The states of all queued resources, by their names."""
        found: dict[str, str] = self.api.cloud.summary()["queued_resources"]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing exists, not even as a failed request."""
        return not self.nodes and not self.queued

    def homes(self, name: str) -> list[Path]:
        """The home directories of a TPU's workers, in order, seen from outside."""
        by_address = {self.hosts.address(host): host for host in self.hosts.names}
        (found,) = [node for node in self.api.client().list_nodes(parent=_ANYWHERE) if node.name.endswith(f"/{name}")]
        return [self.hosts.home(by_address[end.ip_address]) for end in found.network_endpoints]

    def calls(self, method: str) -> list[Mapping[str, Any]]:
        """The requests of one method that the server took."""
        return [call.request for call in self.api.cloud.calls if call.method == method and call.code == "OK"]


class _Machines:
    """What happens to hosts that become workers, and cease to be."""

    def __init__(self, hosts: HostsTestbed) -> None:
        self._hosts = hosts
        self._by_address = {hosts.address(name): name for name in hosts.names}

    def __call__(self, event: WorkerEvent) -> Mapping[str, str] | None:
        host = self._by_address[event.ip_address]
        if event.action == "down":
            _empty(self._hosts, host)
            return None
        public = self._hosts.identity.with_suffix(".pub").read_text().split()[1]
        if public not in event.metadata.get("ssh-keys", ""):
            raise RuntimeError("nobody could log in: the metadata has no key of the testbed's user")
        keys = self._hosts.directory / "hosts" / host / "ssh"
        kind, key = (keys / "ssh_host_ed25519_key.pub").read_text().split()[:2]
        return {f"hostkeys/{kind}": key}


def _empty(hosts: HostsTestbed, host: str) -> None:
    """The machine is gone with all that ran and lay there."""

    def nothing_is_left() -> bool:
        """Somebody who is still logged in may start something meanwhile."""
        left = hosts.processes(host)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            return False
        for entry in hosts.home(host).iterdir():
            with suppress(OSError):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        return not any(hosts.home(host).iterdir())

    eventually(nothing_is_left)


@pytest.fixture
def tpu_pods(hosts: HostsTestbed) -> Iterator[Pods]:
    """TPUs with real machines, as long as the hosts last: four workers in all."""
    from fake_tpu_model import Settings
    from fake_tpu_server import FakeTpuServer

    settings = Settings(**QUICK, ip_base=hosts.address("node1"), machines=len(hosts.names))  # type: ignore[arg-type]
    with FakeTpuServer(settings, worker_hook=_Machines(hosts)) as server:
        yield Pods(server, hosts)


def no_later_than(server: FakeTpuServer, probe: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """The first true thing that *probe* returns, while the cloud goes on."""
    deadline = time.monotonic() + timeout_s
    while not (found := probe()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {server.cloud.summary()}"
        time.sleep(0.02)
    return found
