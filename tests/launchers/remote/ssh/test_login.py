"""Logging in with keys: those that work, and what is said about those that do not."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts_testbed import eventually

from orc.launchers.errors import HostAccessError

Agent = dict[str, str]
OWN = "Host node1\n IdentityFile {}\n IdentitiesOnly yes\n"


def make_key(path: Path, *options: str, passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, *options, "-f", str(path)], check=True)
    return path


def accept(hosts: Any, *keys: Path) -> None:
    """node1 accepts these keys alone."""
    hosts.fault("deny-key", "node1")
    file = hosts.directory / "hosts" / "node1" / "ssh" / "authorized_keys" / "trainer"
    file.write_text("".join(Path(f"{key}.pub").read_text() for key in keys))


def only(hosts: Any, key: Path | str) -> str:
    """A configuration in which the testbed's own key is not mentioned."""
    return (
        f"Host node1\n HostName {hosts.address('node1')}\n User trainer\n IdentityFile {key}\n"
        f" UserKnownHostsFile {hosts.known_hosts}\n"
    )


def refused(transport: Any) -> HostAccessError:
    with pytest.raises(HostAccessError) as caught:
        transport.run(("hostname",), timeout_s=20)
    assert re.match(r"node1 \([0-9.]+:22\)", caught.value.where)
    return caught.value


@pytest.fixture
def enter(hosts: Any, tmp_path: Path) -> Iterator[Any]:
    """A transport to node1 with nothing but this configuration."""
    from orc.launchers.backends.ssh.hosts import open_transports

    opened = []

    def transport(config: str) -> Any:
        (tmp_path / "config").write_text(config)
        options = {"hosts": ["node1"], "ssh_config": str(tmp_path / "config")}
        opened.append(open_transports(hosts.cluster(**options))["node1"])
        return opened[-1]

    yield transport
    for each in opened:
        each.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A running ssh-agent without keys; its socket."""
    path = tmp_path / "agent.socket"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)

    def listens() -> bool:
        assert process.poll() is None
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) == 0

    eventually(listens)
    yield path
    process.terminate()
    process.wait()


def add(agent: Path, key: Path, passphrase: str = "") -> None:
    """Give the agent a key; the file may be encrypted."""
    asks = key.with_suffix(".ask")
    asks.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
    asks.chmod(0o700)
    env = {**os.environ, "SSH_AUTH_SOCK": str(agent), "SSH_ASKPASS": str(asks), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(["ssh-add", "-q", str(key)], env=env, check=True, stdin=subprocess.DEVNULL, timeout=20)


@pytest.mark.parametrize(
    "kind", [("-t", "ed25519"), ("-t", "ecdsa"), ("-t", "rsa", "-b", "2048"), ("-t", "rsa", "-m", "PEM")]
)
def test_every_usual_type_of_key_logs_in(
    hosts: Any, hostname: Any, enter: Any, tmp_path: Path, kind: tuple[str, ...]
) -> None:
    key = make_key(tmp_path / "key", *kind)
    accept(hosts, key)
    assert hostname(enter(only(hosts, key))) == "node1"


def test_the_second_key_is_tried_when_the_first_is_not_accepted(
    hosts: Any, hostname: Any, enter: Any, tmp_path: Path
) -> None:
    first, second = make_key(tmp_path / "a"), make_key(tmp_path / "b")
    accept(hosts, second)
    assert hostname(enter(only(hosts, first) + f" IdentityFile {second}")) == "node1"


def test_keys_that_are_not_accepted_are_listed(hosts: Any, hostname: Any, enter: Any, tmp_path: Path) -> None:
    first, second = make_key(tmp_path / "a"), make_key(tmp_path / "b")
    accept(hosts)
    error = refused(enter(only(hosts, first) + f" IdentityFile {second}"))
    assert "the login of trainer failed" in error.what
    assert f"{first}: not accepted by the host" in error.what
    assert f"{second}: not accepted by the host" in error.what
    assert "ssh-copy-id trainer@node1" in error.hint


def test_an_encrypted_key_without_an_agent_is_named(hosts: Any, hostname: Any, enter: Any, tmp_path: Path) -> None:
    for kind in (("-t", "ed25519"), ("-t", "rsa", "-b", "2048", "-m", "PEM")):
        key = make_key(tmp_path / f"key{len(kind)}", *kind, passphrase="secret")
        error = refused(enter(only(hosts, key)))
        assert f"{key}: encrypted, and no SSH agent holds it: run `ssh-add {key}`" in error.what


def test_an_encrypted_key_that_the_agent_holds_logs_in(
    hosts: Any, hostname: Any, enter: Any, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key(tmp_path / "key", passphrase="secret")
    add(agent, key, "secret")
    accept(hosts, key)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    assert hostname(enter(only(hosts, key))) == "node1"
    monkeypatch.delenv("SSH_AUTH_SOCK")
    assert hostname(enter(only(hosts, key) + f" IdentityAgent {agent}")) == "node1"


def test_a_key_of_the_agent_needs_no_file(
    hosts: Any, hostname: Any, enter: Any, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key(tmp_path / "key")
    add(agent, key)
    accept(hosts, key)
    key.unlink()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    assert hostname(enter(only(hosts, tmp_path / "none"))) == "node1"


def test_with_identities_only_the_agent_s_other_keys_are_not_tried(
    hosts: Any, hostname: Any, enter: Any, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):  # more than sshd lets anybody try
        add(agent, make_key(tmp_path / f"wrong{number}"))
    key = make_key(tmp_path / "right")
    accept(hosts, key)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    error = refused(enter(only(hosts, key)))
    assert "the host closed the connection after" in error.what
    assert "IdentitiesOnly yes" in error.what
    assert hostname(enter(only(hosts, key) + " IdentitiesOnly yes")) == "node1"


def test_a_configured_key_of_the_agent_is_tried_first(
    hosts: Any, hostname: Any, enter: Any, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        add(agent, make_key(tmp_path / f"wrong{number}"))
    key = make_key(tmp_path / "right", passphrase="secret")
    add(agent, key, "secret")
    accept(hosts, key)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    assert hostname(enter(only(hosts, key))) == "node1"


def test_an_agent_that_is_not_there_does_not_matter_until_no_key_works(
    hosts: Any, hostname: Any, enter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "none"))
    assert hostname(enter(only(hosts, hosts.identity))) == "node1"
    error = refused(enter(only(hosts, make_key(tmp_path / "key"))))
    assert f"the SSH agent at {tmp_path}/none does not answer" in error.what


def test_a_key_that_others_can_read_is_not_used(hosts: Any, hostname: Any, enter: Any, tmp_path: Path) -> None:
    key = make_key(tmp_path / "key")
    accept(hosts, key)
    key.chmod(0o644)
    error = refused(enter(only(hosts, key)))
    assert f"{key}: can be read by others (mode 0644): chmod 600 {key}" in error.what


def test_files_that_are_no_usable_keys_are_named(hosts: Any, hostname: Any, enter: Any, tmp_path: Path) -> None:
    nonsense, missing = tmp_path / "nonsense", tmp_path / "missing"
    nonsense.write_text("hello")
    nonsense.chmod(0o600)
    public = Path(f"{make_key(tmp_path / 'key')}.pub")
    public.chmod(0o600)
    error = refused(enter(only(hosts, nonsense) + f" IdentityFile {missing}\n IdentityFile {public}"))
    assert f"{nonsense}: not a private key that can be read" in error.what
    assert f"{missing}: no such file" in error.what
    assert f"{public}: a public key whose private half no SSH agent holds" in error.what


def test_a_type_of_key_that_is_not_supported_is_named(hosts: Any, hostname: Any, enter: Any, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import dsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = tmp_path / "dsa"
    pem = dsa.generate_private_key(1024).private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    key.write_bytes(pem)
    key.chmod(0o600)
    assert f"{key}: a type of key that is not supported" in refused(enter(only(hosts, key))).what


def test_no_key_at_all_is_said(
    hosts: Any, hostname: Any, enter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = only(hosts, "x").replace(" IdentityFile x\n", "")
    assert "there is no key: make one with `ssh-keygen`" in refused(enter(config)).what


def test_a_user_who_may_not_log_in_is_refused(hosts: Any, hostname: Any, enter: Any) -> None:
    error = refused(enter(only(hosts, hosts.identity).replace("User trainer", "User root")))
    assert "the login of root failed" in error.what


def test_a_certificate_beside_the_key_logs_in(hosts: Any, hostname: Any, enter: Any, tmp_path: Path) -> None:
    authority, key = make_key(tmp_path / "authority"), make_key(tmp_path / "key")
    subprocess.run(["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", "trainer", f"{key}.pub"], check=True)
    accept(hosts)
    file = hosts.directory / "hosts" / "node1" / "ssh" / "authorized_keys" / "trainer"
    file.write_text("cert-authority " + Path(f"{authority}.pub").read_text())
    assert hostname(enter(only(hosts, key))) == "node1"
