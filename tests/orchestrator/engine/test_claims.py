from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from orc.orchestrator.engine.claims import Owner, is_free, owner_is_gone


def owner_of_another_process() -> Owner:
    code = "from orc.orchestrator.engine.claims import Owner; print(Owner.new())"
    return Owner.parse(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    )


def test_an_owner_survives_as_text_and_is_never_the_same_twice():
    one, two = Owner.new(), Owner.new()
    assert Owner.parse(str(one)) == one
    assert (one.pid, one.nonce == two.nonce) == (os.getpid(), False)


def test_a_living_process_is_not_gone():
    assert not owner_is_gone(str(Owner.new()))


def test_a_process_that_has_ended_is_gone():
    assert owner_is_gone(str(owner_of_another_process()))


def test_a_process_that_ended_and_was_not_waited_for_is_gone():
    code = "from orc.orchestrator.engine.claims import Owner; print(Owner.new(), flush=True)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    owner = child.stdout.read().strip()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner_is_gone(owner)
    child.wait()
    child.stdout.close()


def test_a_later_process_with_the_same_number_does_not_keep_a_claim_alive():
    assert owner_is_gone(str(replace(Owner.new(), started="1")))


@pytest.mark.parametrize("change", [{"boot_id": "another-boot"}, {"pid_namespace": "1"}])
def test_nobody_is_declared_dead_from_another_machine_or_container(change):
    assert not owner_is_gone(str(replace(owner_of_another_process(), **change)))


@pytest.mark.parametrize(
    ("owner", "expires_at", "gone", "free"),
    [(None, None, False, True), ("x", 10.0, False, False), ("x", 5.0, False, True), ("x", 10.0, True, True)],
)
def test_a_claim_is_free_when_unheld_expired_or_its_owner_is_gone(owner, expires_at, gone, free):
    assert is_free(owner, expires_at, 5.0, lambda _: gone) is free
