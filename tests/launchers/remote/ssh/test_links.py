"""The way to a host: jump hosts, proxies, host keys, and what is said when there is none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hosts_testbed import eventually

from orc.launchers.backends.ssh.hosts import open_transports
from orc.launchers.errors import BackendUnreachable, HostAccessError, LaunchError, LinkLost, SpecError
from orc.launchers.remote.ssh.fanout import each
from orc.launchers.remote.transport import Transport

Reach = Callable[..., Transport]
Name = Callable[[Transport], str]


def came_from(transport: Transport) -> str:
    """The address from which the session was opened."""
    return transport.run(("printenv", "SSH_CLIENT"), timeout_s=20).stdout.split()[0]


def test_the_name_in_the_configuration_may_be_anything(hosts: Any, reach: Reach, hostname: Name) -> None:
    config = f"Host gpu\n HostName {hosts.address('node2')}\n User trainer\n IdentityFile {hosts.identity}\n"
    assert hostname(reach("gpu", f"{config} UserKnownHostsFile {hosts.known_hosts}\n")) == "node2"


def test_a_host_is_reached_through_several_jump_hosts(hosts: Any, reach: Reach, hostname: Name) -> None:
    transport = reach("node1", host={"via": "trainer@node2:22,node3,node4"})
    assert hostname(transport) == "node1"
    assert came_from(transport) == hosts.address("node4")
    who = hosts.run_on("node3", "cat", "/var/log/sshd.log").splitlines()
    assert any(f"Accepted publickey for trainer from {hosts.address('node2')}" in line for line in who)


def test_a_jump_host_may_need_a_jump_host(hosts: Any, reach: Reach, hostname: Name) -> None:
    transport = reach("node1", "Host node1\n ProxyJump node2\nHost node2\n ProxyJump node3\n")
    assert hostname(transport) == "node1"
    assert came_from(transport) == hosts.address("node2")


def test_hosts_behind_one_jump_host_share_its_connection(hosts: Any, tmp_path: Path, hostname: Name) -> None:
    log = hosts.directory / "hosts" / "node4" / "log" / "sshd.log"
    before = log.read_text().count("Accepted publickey")
    behind = [{"name": name, "via": "node4"} for name in hosts.names[:3]]
    transports = open_transports(hosts.cluster(hosts=behind))
    assert each(transports, hostname) == {name: name for name in hosts.names[:3]}
    assert log.read_text().count("Accepted publickey") == before + 1
    hosts.run_on("node4", "pkill", "-KILL", "-f", "sshd: trainer", check=False)
    for transport in transports.values():
        transport.close()
    assert each(transports, hostname) == {name: name for name in hosts.names[:3]}, "a dead jump host is entered again"
    for transport in transports.values():
        transport.close()
    sessions = ("sh", "-c", "pgrep -f 'sshd: trainer' | wc -l")
    eventually(lambda: hosts.run_on("node4", *sessions) == "1")  # the shell that counts


def test_closing_is_quiet_when_the_way_breaks_off_at_that_moment(
    hosts: Any, hostname: Name, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paramiko.packet import Packetizer

    def broken(self: Packetizer, out: bytes) -> NoReturn:
        raise EOFError  # what paramiko makes of a connection that nobody has noticed to be dead

    for way in ("node3", "node4"):
        transports = open_transports(hosts.cluster(hosts=[{"name": "node1", "via": way}]))
        assert hostname(transports["node1"]) == "node1"
        with monkeypatch.context() as patch:
            patch.setattr(Packetizer, "write_all", broken)
            transports["node1"].close()
        assert hostname(transports["node1"]) == "node1"
        transports["node1"].close()


def test_a_program_that_forgets_to_close_ends_quietly(hosts: Any) -> None:
    code = f"""
from orc.launchers.spec.clusters import Cluster
from orc.launchers.backends.ssh.hosts import open_transports
options = dict(hosts=["node1", dict(name="node2", via="node3")], ssh_config={str(hosts.ssh_config)!r})
for transport in open_transports(Cluster(name="lab", kind="ssh", root="/r", options=options)).values():
    print(transport.run(("hostname",), timeout_s=60).stdout.strip())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "node1\nnode2\n", "")


def test_jump_hosts_that_lead_in_a_circle_are_refused(hosts: Any, reach: Reach) -> None:
    config = "Host node1\n ProxyJump node2\nHost node2\n ProxyJump node3\nHost node3\n ProxyJump node2\n"
    with pytest.raises(SpecError, match="jump hosts lead in a circle: node1 -> node2 -> node3 -> node2"):
        reach("node1", config).names("/")


def test_a_jump_host_that_cannot_reach_the_host_says_so(hosts: Any, reach: Reach) -> None:
    hosts.fault("stop-sshd", "node1")
    with pytest.raises(BackendUnreachable) as refused:
        reach("node1", host={"via": "node2"}).names("/")
    assert refused.value.where == f"node1 ({hosts.address('node1')}:22)"
    assert f"node2 ({hosts.address('node2')}:22) cannot reach it" in refused.value.what


def test_a_dead_host_behind_a_jump_host_does_not_count_against_that_one(
    hosts: Any, reach: Reach, hostname: Name
) -> None:
    hosts.fault("drop", "node1")
    behind = [{"name": name, "via": "node2"} for name in ("node1", "node3")]
    transports = open_transports(hosts.cluster(hosts=behind, connect_timeout=2))
    assert hostname(transports["node3"]) == "node3"
    link = transports["node3"]._link  # type: ignore[attr-defined]
    with pytest.raises(BackendUnreachable, match=r"node2 \(.*\) gets no answer from it"):
        transports["node1"].names("/")
    assert hostname(transports["node3"]) == "node3"
    assert transports["node3"]._link is link, "over the same connection"  # type: ignore[attr-defined]
    for transport in transports.values():
        transport.close()


def test_a_dead_jump_host_is_called_once_for_all_behind_it(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from orc.launchers.remote.ssh import connection

    hosts.fault("drop", "node4")
    calls: list[str] = []
    dial = connection._dial
    monkeypatch.setattr(connection, "_dial", lambda route, limit: (calls.append(route.name), dial(route, limit))[1])
    behind = [{"name": name, "via": "node4"} for name in hosts.names[:3]]
    found = each(
        open_transports(hosts.cluster(hosts=behind, connect_timeout=2)), lambda transport: transport.names("/")
    )
    assert [type(error) for error in found.values()] == [BackendUnreachable] * 3
    assert {error.where for error in found.values()} == {f"node4 ({hosts.address('node4')}:22)"}
    assert calls == ["node4"]


def test_a_host_is_reached_through_a_proxy_command(hosts: Any, reach: Reach, hostname: Name) -> None:
    transport = reach("node1", f"Host node1\n ProxyCommand ssh -F {hosts.ssh_config} -W %h:%p node2\n")
    assert hostname(transport) == "node1"
    assert came_from(transport) == hosts.address("node2")


def test_a_proxy_command_that_fails_is_shown(hosts: Any, reach: Reach) -> None:
    with pytest.raises(LinkLost, match="it closes every new connection at once") as lost:
        reach("node1", "Host node1\n ProxyCommand false %h\n", connect_timeout=5).names("/")
    assert f"Does the ProxyCommand work? Try: false {hosts.address('node1')}" in lost.value.hint


# Host keys


def known(tmp_path: Path, text: str) -> str:
    (tmp_path / "known").write_text(text)
    return f"Host *\n UserKnownHostsFile {tmp_path}/known\n"


def test_a_host_that_was_never_seen_is_refused(hosts: Any, reach: Reach, tmp_path: Path) -> None:
    with pytest.raises(HostAccessError, match="its host key is not known: ssh-ed25519 SHA256:"):
        reach("node1", known(tmp_path, "")).names("/")
    assert (tmp_path / "known").read_text() == ""


def test_a_host_that_was_never_seen_is_remembered_when_that_is_wanted(
    hosts: Any, reach: Reach, tmp_path: Path, hostname: Name
) -> None:
    config = known(tmp_path, "")
    assert hostname(reach("node1", config, host_keys="accept-new")) == "node1"
    assert hostname(reach("node1", config)) == "node1", "from now on it is known"
    hosts.fault("rekey", "node1")
    with pytest.raises(HostAccessError, match="its host key has changed"):
        reach("node1", config, host_keys="accept-new").names("/")


@pytest.mark.parametrize("host_keys", ["strict", "accept-new"])
def test_a_changed_host_key_is_refused(hosts: Any, reach: Reach, host_keys: str) -> None:
    hosts.fault("rekey", "node1")
    with pytest.raises(HostAccessError) as refused:
        reach("node1", host_keys=host_keys).names("/")
    assert refused.value.where == f"node1 ({hosts.address('node1')}:22)"
    assert f"is not the one in {hosts.known_hosts}:1" in refused.value.what
    assert f"ssh-keygen -R '{hosts.address('node1')}' -f {hosts.known_hosts}" in refused.value.hint


def test_the_host_key_of_a_jump_host_is_checked_too(hosts: Any, reach: Reach) -> None:
    hosts.fault("rekey", "node2")
    with pytest.raises(HostAccessError) as refused:
        reach("node1", host={"via": "node2"}).names("/")
    assert refused.value.where == f"node2 ({hosts.address('node2')}:22)"


def test_no_key_is_offered_to_a_host_that_is_refused(hosts: Any, reach: Reach) -> None:
    hosts.fault("rekey", "node1")
    log = hosts.directory / "hosts" / "node1" / "log" / "sshd.log"
    before = log.read_text().count("Accepted publickey")
    with pytest.raises(HostAccessError):
        reach("node1").names("/")
    assert log.read_text().count("Accepted publickey") == before


# No way


def test_a_name_without_an_address_is_named(hosts: Any, reach: Reach) -> None:
    with pytest.raises(BackendUnreachable, match="there is no address for 'nowhere'") as error:
        reach("nowhere").names("/")
    assert "address:" in error.value.hint


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stop-sshd", "it refused the connection"),
        ("drop", "it did not answer within 1 s"),
        ("hang-sshd", "something answers, but no SSH server within 1 s"),
    ],
)
def test_a_host_that_cannot_be_entered_is_given_up_with_the_reason(
    hosts: Any, reach: Reach, fault: str, said: str
) -> None:
    hosts.fault(fault, "node1")
    with pytest.raises(BackendUnreachable, match=said):
        reach("node1", connect_timeout=1).names("/")


def test_a_port_with_another_service_is_given_up(hosts: Any, reach: Reach) -> None:
    code = (
        "import socket; s = socket.create_server(('', 8022)); c = s.accept()[0]; c.sendall(b'HTTP/1.1 400\\r\\n' * 200)"
    )
    server = threading.Thread(target=hosts.run_on, args=("node1", "timeout", "50", "python3", "-c", code), daemon=True)
    server.start()
    eventually(lambda: hosts.run_on("node1", "sh", "-c", "ss -ltn | grep -c :8022", check=False) == "1")
    with pytest.raises(BackendUnreachable, match=f"{re.escape(hosts.address('node1'))}:8022"):
        reach("node1", "Host node1\n Port 8022\n", connect_timeout=1).names("/")
    server.join()


# The program that orc runs there


def test_what_a_login_prints_is_ignored(hosts: Any, reach: Reach, hostname: Name) -> None:
    (hosts.home("node1") / ".bashrc").write_text("echo Welcome to node1; head -c 100000 /dev/zero; echo beware >&2\n")
    assert hostname(reach("node1")) == "node1"


def test_the_configured_interpreter_may_be_missing_there(hosts: Any, reach: Reach, hostname: Name) -> None:
    assert hostname(reach("node1", host={"python": "/opt/venv/bin/python"})) == "node1"


def test_an_interpreter_in_the_home_directory_is_found(hosts: Any, reach: Reach, hostname: Name) -> None:
    file = hosts.home("node1") / "my python"
    file.write_text('#!/bin/sh\necho used > "$HOME/used"\nexec python3 "$@"\n')
    file.chmod(0o755)
    assert hostname(reach("node1", host={"python": "~/my python"})) == "node1"
    assert (hosts.home("node1") / "used").exists()


def test_a_host_without_python_is_refused(hosts: Any, reach: Reach) -> None:
    (hosts.home("node1") / ".bashrc").write_text("PATH=/nowhere\n")
    with pytest.raises(HostAccessError, match=r"orc's program could not be started there \(status 127\)") as refused:
        reach("node1", host={"python": "python3"}).names("/")
    assert "Python 3.9 or newer" in refused.value.hint


def test_a_python_that_is_too_old_is_refused(hosts: Any, reach: Reach) -> None:
    file = hosts.home("node1") / "old"
    pretend = "import sys; sys.version_info = (3, 6, 8); sys.version = '3.6.8'; exec(sys.argv[1])"
    file.write_text(f'#!/bin/sh\nexec python3 -c "{pretend}" "$4"\n')
    file.chmod(0o755)
    with pytest.raises(HostAccessError, match=r"is too old: Python 3\.6\.8"):
        reach("node1", host={"python": "/home/trainer/old"}).names("/")


# Connections that are kept


def test_one_connection_serves_everything(hosts: Any, reach: Reach, hostname: Name) -> None:
    transport = reach("node1")
    log = hosts.directory / "hosts" / "node1" / "log" / "sshd.log"
    before = log.read_text().count("Accepted publickey")
    threads = [threading.Thread(target=hostname, args=(transport,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transport.names("/")
    assert log.read_text().count("Accepted publickey") == before + 1


def test_nothing_is_left_on_the_host_when_the_connection_is_closed(hosts: Any, reach: Reach) -> None:
    transport = reach("node1")
    transport.names("/")
    assert len(hosts.processes("node1")) == 2  # the watchdog, and the shell that leads it
    transport.close()
    eventually(lambda: not hosts.processes("node1"))


def test_without_its_watchdog_a_connection_is_not_used_any_more(hosts: Any, reach: Reach, hostname: Name) -> None:
    transport = reach("node1")
    assert hostname(transport) == "node1"
    link = transport._link  # type: ignore[attr-defined]
    hosts.run_on("node1", "pkill", "-KILL", "-u", "trainer", "-f", "python")
    eventually(lambda: not link.alive)
    assert "the watchdog there has ended" in link.failure().what
    assert hostname(transport) == "node1", "over a new one"


def test_a_connection_that_was_closed_while_it_was_made_is_not_kept(
    hosts: Any, reach: Reach, hostname: Name, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orc.launchers.remote.ssh.link import Link

    transport, greeted, made = reach("node1"), Link._greeted, []

    def close_meanwhile(self: Link) -> str:
        made.append(self)
        transport.close()
        return greeted(self)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "_greeted", close_meanwhile)
        with pytest.raises(LinkLost, match="the connection was closed"):
            transport.names("/")
    assert [link.alive for link in made] == [False]
    assert hostname(transport) == "node1"


def test_ctrl_c_while_connecting_ends_at_once(hosts: Any, reach: Reach) -> None:
    hosts.fault("drop", "node1")
    transport = reach("node1", connect_timeout=120)

    def interrupt() -> None:
        eventually(lambda: transport._connecting.locked())  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        transport.names("/")
    assert time.monotonic() - began < 100


def test_closing_does_not_wait_for_a_host_that_is_being_called(hosts: Any, reach: Reach) -> None:
    hosts.fault("drop", "node1")
    transport = reach("node1", connect_timeout=20)
    failures: list[LaunchError] = []

    def call() -> None:
        try:
            transport.names("/")
        except LaunchError as error:
            failures.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    eventually(lambda: transport._connecting.locked())  # type: ignore[attr-defined]
    began = time.monotonic()
    transport.close()
    assert time.monotonic() - began < 15
    calling.join()
    assert failures


def test_ctrl_c_ends_the_command_there(hosts: Any, reach: Reach, hostname: Name) -> None:
    transport = reach("node1")

    def sleeps() -> bool:
        return any("sleep 61" in command for command in hosts.processes("node1").values())

    def interrupt() -> None:
        eventually(sleeps)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        transport.run(("sleep", "61"), timeout_s=60)
    eventually(lambda: not sleeps())
    assert hostname(transport) == "node1"
