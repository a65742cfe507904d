"""The testbed's Slurm as a laptop sees it: a real sshd on the loopback is the login node, with a home of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_testbed import SlurmTestbed, eventually

NAME = "login"
_SSHD = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/identity.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
SetEnv HOME={home}
"""
_CLIENT = """\
Host {name}
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {directory}/identity
  IdentitiesOnly yes
  UserKnownHostsFile {directory}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


class LoginNode:
    """The running sshd and how it is reached."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.ssh_config = directory / "ssh_config"
        self._log = directory / "sshd.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.home.mkdir()
        # Nobody else is given this port as long as it is bound; sshd, which reuses addresses, too, may listen on it.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("127.0.0.1", 0))
        self.port = int(self.held.getsockname()[1])
        for key in ("host_key", "identity"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(directory / key)], check=True
            )
        (directory / "known_hosts").write_text(
            f"[127.0.0.1]:{self.port} {(directory / 'host_key.pub').read_text()}", encoding="utf-8"
        )
        values = {"name": NAME, "port": self.port, "directory": directory, "home": self.home}
        (directory / "sshd_config").write_text(_SSHD.format(**values))
        self.ssh_config.write_text(_CLIENT.format(**values))

    def start(self) -> None:
        """Start sshd; it runs when this returns."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
        assert sshd is not None, "no sshd (Debian: openssh-server)"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self.argv(sshd), stdin=subprocess.DEVNULL, stderr=log)
        eventually(self._listens, every_s=0.02)

    def argv(self, sshd: str) -> list[str]:
        """Return the command that is the login node."""
        return [sshd, "-D", "-e", "-f", str(self.directory / "sshd_config")]

    def stop(self) -> None:
        """Shut sshd down; sessions that are open stay."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def logins(self) -> int:
        """How often somebody has logged in so far."""
        return self._log.read_text().count("Accepted publickey")

    def options(self) -> dict[str, Any]:
        """What the options of an orc cluster need on top of those of the testbed."""
        return {"login": NAME, "ssh_config": str(self.ssh_config)}

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture(scope="session")
def login_node(slurm_testbed: SlurmTestbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoginNode]:
    """A login node of the Slurm testbed, running."""
    node = LoginNode(tmp_path_factory.mktemp("login-node"))
    node.start()
    yield node
    node.stop()
    node.held.close()


@pytest.fixture
def login_cluster(slurm: SlurmTestbed, login_node: LoginNode, tmp_path: Path) -> Any:
    """An orc `Cluster`: the testbed behind its login node, whose root shares nothing with the state directory here."""
    from orc.launchers.spec.clusters import Cluster

    return Cluster(
        name="far",
        kind="slurm",
        root=str(tmp_path / "cluster" / "orc"),
        python=sys.executable,
        options=slurm.cluster_options(query_timeout=20, submit_timeout=30, **login_node.options()),
    )
