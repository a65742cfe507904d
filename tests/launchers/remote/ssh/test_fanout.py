"""The same work on many hosts at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hosts_testbed import eventually

from orc.launchers.backends.ssh.hosts import open_transports
from orc.launchers.errors import BackendError, LaunchError
from orc.launchers.remote.ssh.fanout import each
from orc.launchers.remote.transport import Completed, Transport


def test_results_and_refusals_come_in_the_order_of_the_hosts() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise BackendError("three is down")
        time.sleep(0.01 * (5 - number))
        return number * number

    found = each({f"n{number}": number for number in (5, 3, 1)}, work)
    assert list(found) == ["n5", "n3", "n1"]
    assert (found["n5"], found["n1"]) == (25, 1)
    assert isinstance(found["n3"], LaunchError)


@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_every_host_is_asked_once(count: int) -> None:
    assert each({str(n): n for n in range(count)}, lambda n: n, limit=4) == {str(n): n for n in range(count)}


def test_no_more_than_the_limit_are_asked_at_the_same_time() -> None:
    lock, now, most = threading.Lock(), 0, 0
    all_there = threading.Barrier(5)

    def work(_: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        all_there.wait(60)  # nobody goes on before so many have begun
        with lock:
            now -= 1

    each({str(n): n for n in range(20)}, work, limit=5)
    assert most == 5


def test_a_mistake_of_ours_is_raised_and_ends_the_whole() -> None:
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise ZeroDivisionError
        time.sleep(0.1)

    with pytest.raises(ZeroDivisionError):
        each({str(n): n for n in range(50)}, work, limit=2)
    time.sleep(0.3)
    assert len(begun) < 6


def test_ctrl_c_ends_the_wait_at_once() -> None:
    began, stop, both = time.monotonic(), threading.Event(), threading.Barrier(2)

    def work(_: int) -> None:
        if both.wait(60) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        stop.wait(100)

    with pytest.raises(KeyboardInterrupt):
        each({"a": 1, "b": 2}, work)
    assert time.monotonic() - began < 90
    stop.set()


def test_61_of_64_hosts_answer_while_3_dead_ones_are_waited_for(hosts: Any, tmp_path: Path) -> None:
    """16 addresses per sshd; of the dead ones one is not there, one does not listen, one swallows everything.

    The last does so until most of the others have answered, however long that takes.
    """
    simulated, config = (
        [],
        ["Host *", "    User trainer", f"    IdentityFile {hosts.identity}", "    IdentitiesOnly yes"],
    )
    config.append(f"    UserKnownHostsFile {hosts.known_hosts}")
    for node, name in enumerate(hosts.names):
        addresses = [hosts.free_address(100 + 16 * node + k) for k in range(16)]
        commands = " && ".join(f"ip addr replace {address}/24 dev eth0" for address in addresses)
        hosts.run_on(name, "/bin/sh", "-c", commands)
        for address in addresses:
            simulated.append({"name": f"sim{len(simulated)}", "address": address})
            config[:0] = [f"Host {simulated[-1]['name']}", f"    HostKeyAlias {name}"]
    blackhole = hosts.free_address(140)
    simulated[5]["address"] = hosts.free_address(250)
    simulated[20]["port"] = 2222
    for words in ("add table ip swallow", "add chain ip swallow in { type filter hook input priority 0; }"):
        hosts.run_on("node3", "nft", words)
    hosts.run_on("node3", "nft", f"add rule ip swallow in ip daddr {blackhole} drop")
    file = tmp_path / "config"
    file.write_text("\n".join(config))
    transports = open_transports(hosts.cluster(hosts=simulated, ssh_config=str(file), connect_timeout=120))

    order: list[str] = []

    def ask(transport: Transport) -> Completed:
        try:
            return transport.run(("hostname",), timeout_s=120)
        finally:
            order.append(transport.name)
            if order.index(transport.name) == 44:
                hosts.run_on("node3", "nft", f"insert rule ip swallow in ip daddr {blackhole} reject with tcp reset")

    try:
        began = time.monotonic()
        first = each(transports, ask)
        cold = time.monotonic() - began
        dead = [name for name, result in first.items() if isinstance(result, LaunchError)]
        assert dead == ["sim5", "sim20", "sim40"], [str(first[name]) for name in dead]
        assert order.index("sim40") > 40, "it swallows everything: nobody waits for it"
        reached = {name: transport for name, transport in transports.items() if name not in dead}
        began = time.monotonic()
        second = each(reached, ask)
        warm = time.monotonic() - began
        assert [done.stdout for done in second.values()] == [  # type: ignore[union-attr]
            f"node{1 + n // 16}\n" for n in range(64) if f"sim{n}" not in dead
        ]
        print(f"64 hosts: {cold:.2f} s cold, {warm * 1e3:.0f} ms warm")
    finally:
        each(transports, lambda transport: transport.close())
        # The end of a connection does not arrive at an address that is gone.
        eventually(lambda: not hosts.leftovers(), timeout_s=60)
        hosts.run_on("node3", "nft", "delete", "table", "ip", "swallow", check=False)
        for name in hosts.names:
            own = hosts.address(name)
            hosts.run_on(name, "/bin/sh", "-c", f"ip addr flush dev eth0 secondary; ip addr replace {own}/24 dev eth0")
