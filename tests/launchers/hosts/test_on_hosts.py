"""Real hosts over SSH, sound and broken, as `orc doctor --cluster` sees them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from orc.launchers.backends.ssh.hosts import open_transports
from orc.launchers.hosts.diagnostics import HostDiagnostics, diagnose_hosts

pytestmark = pytest.mark.hosts


def transports(hosts: Any) -> dict[str, Any]:
    return open_transports(hosts.cluster(connect_timeout=10))


def examined(hosts: Any, **options: Any) -> HostDiagnostics:
    reached = transports(hosts)
    try:
        return diagnose_hosts(
            reached,
            dict.fromkeys(reached, "~/orc"),
            {**dict.fromkeys(reached, sys.executable), **options.pop("pythons", {})},
            **options,
        )
    finally:
        for transport in reached.values():
            transport.close()


def test_sound_hosts_are_measured_and_nothing_is_left_there(hosts: Any) -> None:
    found = examined(hosts)
    assert [f for f in found.findings if f.level == "error"] == []
    rows = found.hosts()
    assert [row["host"] for row in rows] == list(hosts.names)
    assert all(row["reachable"] and row["torch"].startswith("2.") for row in rows)
    assert all(row["all_reduce_mb_s"] > 1 and row["latency_us"] > 10 for row in rows)


def test_every_kind_of_bad_host_is_named(hosts: Any) -> None:
    first, cut_off, gone, other = hosts.names[:4]
    hosts.fault("isolate", cut_off)
    hosts.fault("crash", gone)
    found = examined(hosts, pythons={other: "/usr/bin/python3"})
    said = {(f.where, f.what.split(":")[0]) for f in found.findings if f.level == "error"}
    assert any(where == gone for where, _ in said)
    assert (other, "torch") in said
    assert ("", f"{first} and {cut_off} cannot talk") in said
    assert set(found.bad) == {cut_off, gone, other}
    assert found.bad[cut_off] == "other hosts cannot talk to it"


def test_a_slow_link_is_found_by_the_all_reduce(hosts: Any) -> None:
    slow = hosts.names[2]
    hosts.fault("rate", slow, "40mbit")
    found = examined(hosts)
    assert slow in [f.where for f in found.findings if f.what.startswith("its network is slow")]
    assert "its network is slow" in found.bad[slow]
