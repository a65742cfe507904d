"""A link that is cut, goes silent or is slow; disks that are full; processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hosts_testbed import eventually

from orc.launchers.errors import BackendUnreachable, LinkLost
from orc.launchers.remote.transport import CommandTimeout, Transport

Reach = Callable[..., Transport]
Name = Callable[[Transport], str]
Later = Callable[..., "Future[Any]"]


def gone(hosts: Any, word: str) -> None:
    """Wait until no command line on node1 has *word* in it."""
    eventually(lambda: not any(word in command for command in hosts.processes("node1").values()))


def running(hosts: Any, word: str) -> None:
    """Wait until a command line on node1 has *word* in it."""
    eventually(lambda: any(word in command for command in hosts.processes("node1").values()))


@pytest.fixture
def later(hosts: Any) -> Iterator[Later]:
    """``later(what, *arguments)``: begin it now, beside the test, which ends when it has; its failure is the test's."""
    with ThreadPoolExecutor() as pool:
        begun: list[Future[Any]] = []

        def begin(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
            begun.append(pool.submit(work, *arguments))
            return begun[-1]

        yield begin
        for work in begun:
            work.result()


@pytest.mark.parametrize("verb", ["cut", "drop"])
def test_a_command_whose_link_dies_is_given_up_here_and_ended_there(
    hosts: Any, reach: Reach, later: Later, verb: str
) -> None:
    transport = reach("node1", connect_timeout=5)
    transport.names("/")

    def break_it() -> None:
        running(hosts, "sleep 71")
        hosts.fault(verb, "node1")

    later(break_it)
    with pytest.raises(LinkLost, match="node1: it has been silent for 5 s"):
        transport.run(("sleep", "71"), timeout_s=170)
    gone(hosts, "sleep 71")  # although the link is still dead


def test_a_short_cut_does_no_harm(hosts: Any, reach: Reach, later: Later) -> None:
    transport = reach("node1", connect_timeout=40)
    transport.names("/")

    def blink() -> None:
        running(hosts, "sleep 0.1")
        hosts.fault("cut", "node1")
        time.sleep(1.2)
        hosts.fault("heal", "node1")
        (hosts.home("node1") / "healed").touch()

    later(blink)
    script = "until [ -e ~/healed ]; do sleep 0.1; done; echo done"
    assert transport.run(("/bin/sh", "-c", script), timeout_s=120).stdout == "done\n"


def test_a_dead_link_during_a_stream_is_noticed_by_every_call(hosts: Any, reach: Reach) -> None:
    transport = reach("node1", connect_timeout=5)
    with transport.stream(("/bin/sh", "-c", "cat >/dev/null; echo 72"), timeout_s=120) as program:
        program.write(b"x" * 100_000)
        hosts.fault("drop", "node1")
        with pytest.raises(LinkLost):
            program.read(10)
        with pytest.raises(LinkLost):
            program.write(b"x")
        with pytest.raises(LinkLost):
            program.wait()


def test_a_file_whose_link_dies_is_whole_or_as_before(hosts: Any, reach: Reach, later: Later) -> None:
    transport = reach("node1", connect_timeout=5)
    transport.write("/home/trainer/file", b"before")
    hosts.fault("rate", "node1", "2mbit")

    def break_it() -> None:
        eventually(lambda: len(os.listdir(hosts.home("node1"))) > 1)  # a part has arrived
        hosts.fault("drop", "node1")

    later(break_it)
    with pytest.raises(BackendUnreachable):
        transport.write("/home/trainer/file", b"x" * 4_000_000)
    assert (hosts.home("node1") / "file").read_bytes() == b"before"
    gone(hosts, "python")
    assert os.listdir(hosts.home("node1")) == ["file"], "the half that arrived is removed"


def test_a_link_that_comes_back_is_used_again(hosts: Any, reach: Reach, hostname: Name) -> None:
    transport = reach("node1", connect_timeout=5)
    assert hostname(transport) == "node1"
    hosts.fault("drop", "node1")
    with pytest.raises(BackendUnreachable):
        hostname(transport)
    hosts.fault("heal", "node1")
    assert hostname(transport) == "node1"


def test_a_connection_that_died_while_nobody_looked_is_made_anew(hosts: Any, reach: Reach, hostname: Name) -> None:
    """As after the laptop has slept: the host forgot the connection without being able to say so."""
    transport = reach("node1", connect_timeout=5)
    assert hostname(transport) == "node1"
    hosts.fault("drop", "node1")
    for pid in hosts.run_on("node1", "pgrep", "-f", "sshd: trainer").split():
        hosts.run_on("node1", "kill", "-KILL", pid, check=False)
    hosts.fault("heal", "node1")
    hosts.fault("block", "node1", "1")  # a firewall that is not in the way of anything
    assert hostname(transport) == "node1"


@pytest.mark.parametrize("operation", ["run", "write", "read_many", "names"])
def test_a_closed_session_is_opened_again_when_it_is_needed(hosts: Any, reach: Reach, operation: str) -> None:
    transport = reach("node1")
    transport.write("/home/trainer/a", b"1")
    hosts.run_on("node1", "pkill", "-KILL", "-f", "sshd: trainer")
    if operation == "run":
        eventually(lambda: not transport._link.alive)  # type: ignore[attr-defined] # or its outcome would be unknown
        assert transport.run(("cat", "/home/trainer/a"), timeout_s=10).stdout == "1"
    elif operation == "write":
        transport.write("/home/trainer/a", b"2")
        assert transport.read("/home/trainer/a") == b"2"
    elif operation == "read_many":
        assert transport.read_many(["/home/trainer/a"]) == {"/home/trainer/a": b"1"}
    else:
        assert transport.names("/home/trainer") == ["a"]


def test_a_command_whose_session_is_killed_is_lost_at_once_and_ended_there(
    hosts: Any, reach: Reach, later: Later
) -> None:
    transport = reach("node1", connect_timeout=100)
    transport.names("/")

    def break_it() -> None:
        running(hosts, "sleep 74")
        hosts.run_on("node1", "pkill", "-KILL", "-f", "sshd: trainer")

    later(break_it)
    with pytest.raises(LinkLost, match="the connection was cut"):  # and not that it was silent for 100 s
        transport.run(("sleep", "74"), timeout_s=170)
    gone(hosts, "sleep 74")


@pytest.mark.parametrize(("breaks", "mends"), [("stop-sshd", "start-sshd"), ("hang-sshd", "resume-sshd")])
def test_a_running_session_does_not_need_the_sshd_that_took_it(
    hosts: Any, reach: Reach, hostname: Name, later: Later, breaks: str, mends: str
) -> None:
    transport = reach("node1", connect_timeout=5)
    transport.names("/")

    def break_it() -> None:
        running(hosts, "sleep 0.1")
        hosts.fault(breaks, "node1")
        (hosts.home("node1") / "broken").touch()

    later(break_it)
    script = "until [ -e ~/broken ]; do sleep 0.1; done; echo done"
    assert transport.run(("/bin/sh", "-c", script), timeout_s=120).stdout == "done\n"
    transport.write("/home/trainer/file", b"x" * 1_000_000)
    transport.close()
    with pytest.raises(BackendUnreachable, match=r"refused the connection|no SSH server"):
        hostname(transport)
    hosts.fault(mends, "node1")
    assert hostname(transport) == "node1"


def test_what_a_killed_laptop_had_started_is_ended(hosts: Any) -> None:
    code = f"""
from orc.launchers.spec.clusters import Cluster
from orc.launchers.backends.ssh.hosts import open_transports
options = dict(hosts=["node1"], ssh_config={str(hosts.ssh_config)!r})
cluster = Cluster(name="lab", kind="ssh", root="/r", options=options)
open_transports(cluster)["node1"].run(("sleep", "76"), timeout_s=60)
"""
    laptop = subprocess.Popen([sys.executable, "-c", code])
    eventually(lambda: any("sleep 76" in command for command in hosts.processes("node1").values()))
    laptop.send_signal(signal.SIGKILL)
    laptop.wait()
    eventually(lambda: not hosts.processes("node1"))


def test_every_operation_takes_two_round_trips_and_its_input_one_more(hosts: Any, reach: Reach) -> None:
    transport = reach("node1")
    transport.write("/home/trainer/a", b"x" * 50_000)
    hosts.fault("slow", "node1", "300ms")  # each way
    operations: dict[str, Callable[[], Any]] = {
        "run": lambda: transport.run(("true",), timeout_s=10),
        "run with input": lambda: transport.run(("cat",), timeout_s=10, stdin=b"x" * 20_000),
        "write": lambda: transport.write("/home/trainer/new/b", b"x" * 50_000),
        "read": lambda: transport.read("/home/trainer/a"),
        "read_many": lambda: transport.read_many([f"/home/trainer/{n}" for n in "abcxyz"]),
        "names": lambda: transport.names("/home/trainer"),
        "mkdir": lambda: transport.mkdir("/home/trainer/dir/y/z"),
        "remove": lambda: transport.remove("/home/trainer/c"),
    }

    with_input = ("run with input", "write", "read_many")

    def seconds(operation: Callable[[], Any]) -> float:
        began = time.monotonic()
        operation()
        return time.monotonic() - began

    for name, operation in operations.items():
        took: list[float] = []
        most = 0.6 * (3 if name in with_input else 2) + 0.5
        while not took or (took[-1] >= most and len(took) < 10):  # a machine under load is slow now and then
            took.append(seconds(operation))
        assert took[-1] < most, (name, took)
    assert transport.expand("~/x") == "/home/trainer/x"
    assert min(seconds(lambda: transport.expand("~/x")) for _ in range(10)) < 0.6, "known since the connection was made"


def test_a_slow_line_is_not_a_dead_one(hosts: Any, reach: Reach) -> None:
    transport = reach("node1", connect_timeout=5)
    transport.names("/")
    hosts.fault("rate", "node1", "1mbit")
    data = os.urandom(700_000)
    began = time.monotonic()
    transport.write("/home/trainer/file", data)
    assert transport.read("/home/trainer/file") == data
    assert time.monotonic() - began > 2 * 5, "longer than the silence that is allowed"


def test_a_command_that_is_silent_for_long_is_not_lost(hosts: Any, reach: Reach) -> None:
    transport = reach("node1", connect_timeout=5)
    assert transport.run(("sleep", "7"), timeout_s=120).status == 0
    with pytest.raises(CommandTimeout, match="sleep did not answer within 1 s"):
        transport.run(("sleep", "77"), timeout_s=1)
    gone(hosts, "sleep 77")
