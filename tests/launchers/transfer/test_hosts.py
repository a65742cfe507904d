"""Syncs to real SSH hosts (tests/testbed/hosts) whose links, disks and power fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orc.launchers.backends.ssh import SshBackend
from orc.launchers.errors import BackendUnreachable
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.gc import GcReport, GcRequest
from orc.launchers.snapshot.scan import Bundle
from orc.launchers.transfer.delivery import SyncReport, sync
from orc.launchers.transfer.targets import Targets, collect_garbage

if TYPE_CHECKING:
    from hosts_testbed import HostsTestbed

pytestmark = pytest.mark.hosts


@pytest.fixture
def big(tree: Path, store: ContentStore) -> Bundle:
    """A snapshot of 12 MB that does not get smaller by compressing."""
    for number in range(6):
        (tree / f"part-{number}.bin").write_bytes(os.urandom(2_000_000))
    return store.snapshot(tree).bundle


@pytest.fixture
def lab(hosts: HostsTestbed) -> Iterator[Targets]:
    with closing(SshBackend(hosts.cluster(connect_timeout=8))) as backend:
        yield backend.stores()


def deliver(targets: Targets, store: ContentStore, *bundles: Bundle, **options: Any) -> dict[str, SyncReport]:
    return sync(bundles, store, targets.roots, pythons=targets.pythons, **options)


def remote_store(hosts: HostsTestbed, name: str) -> ContentStore:
    return ContentStore(hosts.root(name) / "store")


def failed(reports: dict[str, SyncReport]) -> list[str]:
    return [name for name, report in reports.items() if report.error is not None]


def when_first_bytes_go(act: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """A progress callback that calls *act* once, with the first host that is sent something."""
    done: list[str] = []

    def progress(host: str, sent: int, total: int) -> None:
        if not done and 0 < sent < total:
            done.append(host)
            act(host)

    return progress


def test_every_host_gets_the_snapshot_and_nothing_more_when_it_is_unchanged(
    hosts: HostsTestbed, lab: Targets, store: ContentStore, big: Bundle
) -> None:
    reports = deliver(lab, store, big)
    assert failed(reports) == []
    assert {report.source for report in reports.values()} == {"laptop"}
    for name in hosts.names:
        assert remote_store(hosts, name).verify(big.digest) == []
    again = deliver(lab, store, big)
    assert failed(again) == []
    assert all(report.sent < 25_000 and not report.new for report in again.values())


@pytest.mark.parametrize("fault", ["drop", "stop-sshd"])
def test_a_host_out_of_reach_is_named_and_the_others_get_theirs(
    hosts: HostsTestbed, lab: Targets, store: ContentStore, big: Bundle, fault: str
) -> None:
    hosts.fault(fault, "node3")
    reports = deliver(lab, store, big)
    assert failed(reports) == ["node3"]
    assert isinstance(reports["node3"].error, BackendUnreachable)
    assert "node3" in str(reports["node3"].error)
    for name in set(hosts.names) - {"node3"}:
        assert remote_store(hosts, name).verify(big.digest) == []
    hosts.mend()
    assert failed(deliver(lab, store, big)) == []


@pytest.mark.parametrize("fault", ["cut", "drop"])
def test_a_link_cut_during_the_sync_costs_that_host_only(
    hosts: HostsTestbed, lab: Targets, store: ContentStore, big: Bundle, fault: str
) -> None:
    victims: list[str] = []

    def break_it(host: str) -> None:
        victims.append(host)
        hosts.fault(fault, host)

    reports = deliver(lab, store, big, on_progress=when_first_bytes_go(break_it))
    assert failed(reports) == victims
    assert isinstance(reports[victims[0]].error, BackendUnreachable)
    for name in set(hosts.names) - set(victims):
        assert remote_store(hosts, name).verify(big.digest) == []
    assert not remote_store(hosts, victims[0]).has(big.digest)
    hosts.mend()
    assert failed(deliver(lab, store, big)) == []
    assert remote_store(hosts, victims[0]).verify(big.digest) == []


LAPTOP = """
import sys
from pathlib import Path
from hosts_testbed import HostsTestbed
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.transfer.delivery import sync
from orc.launchers.backends.ssh import SshBackend
store = ContentStore(sys.argv[2])
backend = SshBackend(HostsTestbed(Path(sys.argv[1])).cluster())
lab = backend.stores()
try:
    def progress(host, sent, total):
        if sent * 4 > total:
            print("under way", flush=True)
            sys.stdin.readline()
    sync([store.load(sys.argv[3])], store, lab.roots, pythons=lab.pythons, on_progress=progress)
finally:
    backend.close()
"""


def test_a_laptop_that_is_killed_leaves_nothing_half_made(
    hosts: HostsTestbed, lab: Targets, store: ContentStore, big: Bundle
) -> None:
    laptop = subprocess.Popen(
        [sys.executable, "-c", LAPTOP, str(hosts.directory), str(store.root), big.digest],
        env={**os.environ, "PYTHONPATH": "tests/testbed:tests/testbed/hosts"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with laptop:
        assert laptop.stdout is not None
        assert laptop.stdout.readline() == "under way\n"
        laptop.send_signal(signal.SIGKILL)
    # That no process and no temporary file stays is checked after every test.
    for name in hosts.names:
        assert not remote_store(hosts, name).has(big.digest)


def test_garbage_is_collected_on_all_hosts(
    hosts: HostsTestbed, lab: Targets, store: ContentStore, big: Bundle, tree: Path
) -> None:
    (tree / "part-0.bin").unlink()
    kept = store.snapshot(tree).bundle
    deliver(lab, store, big, kept)
    for name in hosts.names:
        for digest in (big.digest, kept.digest):
            os.utime(remote_store(hosts, name).manifest_path(digest), (0, 0))
    hosts.fault("crash", "node4")
    found = collect_garbage(lab, GcRequest("", 0, keep=frozenset({kept.digest})))
    for name in ("node1", "node2", "node3"):
        result = found[name]
        assert isinstance(result, GcReport)
        assert result.snapshots == [big.digest]
        assert (result.contents, result.size) == (1, 2_000_000)
        assert remote_store(hosts, name).verify(kept.digest) == []
        assert not remote_store(hosts, name).has(big.digest)
    assert isinstance(found["node4"], BackendUnreachable)
