"""The way to a pod's workers: their addresses, their host keys, an SSH configuration of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orc.launchers.backends.tpu.lifecycle import Node
from orc.launchers.backends.tpu.settings import read_settings
from orc.launchers.backends.tpu.workers import Worker, known_hosts, open_workers, ssh_config, workers_of
from orc.launchers.errors import BackendUnreachable
from orc.launchers.remote.ssh import known_hosts as trusted
from orc.launchers.remote.ssh.routes import ConnectOptions, HostSpec, read_config, resolve, ssh_argv
from orc.launchers.spec.clusters import Cluster

Make = Callable[..., Cluster]
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIJ2T0tAAAA=="
NODE = Node(
    "projects/p/locations/us-central2-b/nodes/orc-digits-k3f9a2-a1",
    "READY",
    addresses=(("10.0.0.2", "34.1.2.3"), ("10.0.0.3", "34.1.2.4")),
    serial=7,
)
PRIVATE = Node(NODE.name, "READY", addresses=(("10.0.0.2", ""), ("10.0.0.3", "")), serial=8)


class Api:
    """Guest attributes, and how often they were asked for."""

    def __init__(self, *keys: dict[str, str]) -> None:
        self.keys = list(keys)
        self.asked = 0

    def host_keys(self, _node: Node) -> list[dict[str, str]]:
        self.asked += 1
        return self.keys


def test_external_addresses_come_first_unless_internal_ones_are_wanted(cluster: Make) -> None:
    by_default, inside = read_settings(cluster()).options, read_settings(cluster(internal=True)).options
    assert [w.address for w in workers_of(NODE, by_default)] == ["34.1.2.3", "34.1.2.4"]
    assert [w.address for w in workers_of(NODE, inside)] == ["10.0.0.2", "10.0.0.3"]
    assert [w.address for w in workers_of(PRIVATE, by_default)] == ["10.0.0.2", "10.0.0.3"]
    assert [w.internal for w in workers_of(NODE, by_default)] == ["10.0.0.2", "10.0.0.3"]


def test_the_published_host_keys_are_trusted_and_no_others(cluster: Make, tmp_path: Path) -> None:
    api = Api({"ssh-ed25519": KEY}, {"ssh-ed25519": KEY, "ssh-rsa": f"{KEY}\n", "evil\nline": KEY, "x": "not base64!"})
    workers = open_workers(api, read_settings(cluster(user="me")), NODE, tmp_path)  # type: ignore[arg-type]
    config = read_config([workers.ssh_config])
    for number in (0, 1):
        route = resolve(HostSpec(f"worker-{number}"), config)
        assert (route.address, route.port, route.user) == (f"34.1.2.{3 + number}", 22, "me")
        kinds = {entry.kind for entry in trusted.entries(route.host_key_name, route.known_hosts)}
        assert kinds == ({"ssh-ed25519"} if number == 0 else {"ssh-ed25519", "ssh-rsa"})
    assert "evil" not in (tmp_path / "known_hosts").read_text()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_the_api_is_asked_for_keys_once_for_each_pod(cluster: Make, tmp_path: Path) -> None:
    api, settings = Api({"ssh-ed25519": KEY}, {"ssh-ed25519": KEY}), read_settings(cluster())
    for _ in range(3):
        open_workers(api, settings, NODE, tmp_path)  # type: ignore[arg-type]
    assert api.asked == 1
    open_workers(api, settings, PRIVATE, tmp_path)  # type: ignore[arg-type]  # another one of the same name
    assert api.asked == 2


def test_workers_without_published_keys_are_waited_for(cluster: Make, tmp_path: Path) -> None:
    api = Api({"ssh-ed25519": KEY}, {})
    with pytest.raises(BackendUnreachable, match="worker-1 has not published its host keys yet"):
        open_workers(api, read_settings(cluster()), NODE, tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    nobody = Node(NODE.name, "READY")
    with pytest.raises(BackendUnreachable, match="no addresses yet"):
        open_workers(api, read_settings(cluster()), nobody, tmp_path)  # type: ignore[arg-type]


def test_two_pods_at_the_same_address_do_not_share_a_key() -> None:
    other = Node(NODE.name.replace("-a1", "-a2"), "READY")
    machine = Worker("worker-0", "34.1.2.3", "10.0.0.2")
    one, two = (known_hosts(node, [machine], [{"ssh-ed25519": KEY}]) for node in (NODE, other))
    assert one.split()[0] == "orc-digits-k3f9a2-a1-worker-0"
    assert two.split()[0] == "orc-digits-k3f9a2-a2-worker-0"


def test_key_jump_host_and_the_users_own_configuration_hold(cluster: Make, tmp_path: Path) -> None:
    key, own = tmp_path / "my key", tmp_path / "own"
    key.with_suffix(".pub").write_text("ssh-ed25519 AAAA me\n")
    own.write_text("Host bastion\n  HostName 192.0.2.1\n  Port 2222\nHost *\n  User nobody\n  HashKnownHosts yes\n")
    options = {"ssh_key": str(key), "user": "me", "via": "bastion", "port": 2200, "ssh_config": str(own)}
    settings = read_settings(cluster(**options))
    machines = workers_of(NODE, settings.options)
    file = tmp_path / "ssh_config"
    file.write_text(ssh_config(NODE, machines, settings.options, tmp_path / "known hosts"))
    config = read_config([str(file)])
    route = resolve(HostSpec("worker-1"), config)
    assert (route.user, route.port, route.identities, route.identities_only) == ("me", 2200, (str(key),), True)
    assert route.known_hosts[0] == str(tmp_path / "known hosts")
    assert [jump.name for jump in route.jumps] == ["bastion"]
    assert resolve(route.jumps[0], config).address == "192.0.2.1"


def test_openssh_reads_it_the_same_way(cluster: Make, tmp_path: Path) -> None:
    import subprocess

    api = Api({"ssh-ed25519": KEY}, {"ssh-ed25519": KEY})
    own = tmp_path / "own"
    own.write_text("Host *\n  ServerAliveInterval 77\n")
    settings = read_settings(cluster(user="me", ssh_config=str(own)))
    workers = open_workers(api, settings, NODE, tmp_path / "state")  # type: ignore[arg-type]
    argv = ssh_argv(HostSpec("worker-1"), ConnectOptions(ssh_config=workers.ssh_config), terminal=True)
    shown = subprocess.run(["ssh", "-G", *argv[1:]], capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = {
        "hostname 34.1.2.4",
        "user me",
        "hostkeyalias orc-digits-k3f9a2-a1-worker-1",
        f"userknownhostsfile {tmp_path}/state/known_hosts /dev/null",
        "serveraliveinterval 77",
    }
    assert wanted <= set(shown)
