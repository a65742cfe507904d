"""The fixture that all tests on hosts rely on."""

from __future__ import annotations

import subprocess
from typing import Any

from hosts_testbed import eventually


def test_hosts_are_machines_of_their_own(hosts: Any) -> None:
    found = {
        name: subprocess.run(["ssh", name, "hostname"], capture_output=True, text=True).stdout for name in hosts.names
    }
    assert found == {name: f"{name}\n" for name in hosts.names}
    assert len({hosts.address(name) for name in hosts.names}) == len(hosts.names) == 4


def test_what_a_test_leaves_is_found_and_removed(hosts: Any) -> None:
    as_user = "setpriv --reuid 7700 --regid 7700 --clear-groups setsid"
    hosts.run_on("node2", "sh", "-c", f"{as_user} sleep 99 >/dev/null 2>&1 & {as_user} true")
    (hosts.root("node3") / "store" / "tmp").mkdir(parents=True)
    (hosts.root("node3") / "store" / "tmp" / "half").touch()
    (hosts.root("node3") / "store" / "cas").touch()
    eventually(lambda: list(hosts.processes("node2").values()) == ["sleep 99"])  # it has become that by now
    process, file = hosts.leftovers()
    assert process.startswith("node2: process ")
    assert process.endswith(": sleep 99")
    assert file == "node3: orc/store/tmp/half"
    hosts.clean()
    assert hosts.leftovers() == []
    assert list(hosts.home("node3").iterdir()) == []


def test_what_a_test_breaks_is_mended(hosts: Any) -> None:
    public = hosts.directory / "hosts/node2/ssh/ssh_host_ed25519_key.pub"
    before = public.read_text().split()[:2]
    for verb, host in (
        ("hang-sshd", "node1"),
        ("rekey", "node2"),
        ("full", "node3"),
        ("crash", "node4"),
        ("cut", "node3"),
    ):
        hosts.fault(verb, host)
    hosts.mend()
    assert public.read_text().split()[:2] == before
    test_hosts_are_machines_of_their_own(hosts)
