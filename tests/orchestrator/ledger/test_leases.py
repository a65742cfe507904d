from __future__ import annotations

import os
import subprocess
import sys

import pytest

from orc.orchestrator.ledger import leases
from orc.orchestrator.ledger.leases import is_free, new_owner, owner_is_gone

CODE = "from orc.orchestrator.ledger.leases import new_owner; print(new_owner(), flush=True)"


def owner_of_another_process() -> str:
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.strip()


def test_an_owner_is_never_the_same_twice():
    assert new_owner() != new_owner()


def test_a_living_process_is_not_gone():
    assert not owner_is_gone(new_owner())


def test_a_process_that_has_ended_is_gone():
    assert owner_is_gone(owner_of_another_process())


def test_a_process_that_ended_and_was_not_waited_for_is_gone():
    child = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    owner = child.stdout.read().strip()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner_is_gone(owner)
    child.wait()
    child.stdout.close()


def test_a_later_process_with_the_same_number_does_not_keep_a_claim_alive():
    boot_id, namespace, pid, _, nonce = new_owner().split("/")
    assert owner_is_gone(f"{boot_id}/{namespace}/{pid}/1/{nonce}")


@pytest.mark.parametrize(("part", "value"), [(0, "another-boot"), (1, "1")])
def test_nobody_is_declared_dead_from_another_machine_or_container(part, value):
    parts = owner_of_another_process().split("/")
    parts[part] = value
    assert not owner_is_gone("/".join(parts))


@pytest.mark.parametrize(
    ("owner", "expires_at", "gone", "free"),
    [(None, None, False, True), ("x", 10.0, False, False), ("x", 5.0, False, True), ("x", 10.0, True, True)],
)
def test_a_claim_is_free_when_unheld_expired_or_its_owner_is_gone(owner, expires_at, gone, free, monkeypatch):
    monkeypatch.setattr(leases, "owner_is_gone", lambda _: gone)
    assert is_free(owner, expires_at, 5.0) is free


def test_who_is_overtaken_between_its_look_and_its_write_takes_nothing(database):
    key = {"name": "retention"}
    with database.write() as connection:
        assert leases.take(connection, "duties", key, "me", 100.0, 30.0)

        class Overtaken:
            execute = connection.execute

            def tuples(self, sql, parameters):
                rows = connection.tuples(sql, parameters)
                assert leases.take(connection, "duties", key, "they", 140.0, 30.0)
                return rows

        assert not leases.take(Overtaken(), "duties", key, "you", 140.0, 30.0)
        assert connection.tuples("SELECT lease_owner FROM duties") == [("they",)]
