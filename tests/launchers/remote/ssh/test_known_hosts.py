"""Host keys: known, unknown, changed, revoked."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from orc.launchers.errors import HostAccessError
from orc.launchers.remote.ssh import known_hosts
from orc.launchers.remote.ssh.routes import Route

KEY = paramiko.ECDSAKey.generate()
OTHER = paramiko.ECDSAKey.generate()
RSA = paramiko.RSAKey.generate(1024)


def line(names: str, key: paramiko.PKey = KEY) -> str:
    return f"{names} {key.get_name()} {key.get_base64()} a comment\n"


def route(tmp_path: Path, text: str, name: str = "node1") -> Route:
    (tmp_path / "known").write_text(text)
    known = (str(tmp_path / "known"), str(tmp_path / "missing"))
    return Route("node1", "10.0.0.1", 22, "me", known_hosts=known, host_key_name=name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (line("node1"), "node1"),
        (line("other,NODE1,10.0.0.1"), "node1"),
        (line("node?"), "node1"),
        (line("*.lab"), "node1.lab"),
        (line("[10.0.0.1]:2222"), "[10.0.0.1]:2222"),
        (line("[*.lab]:2222"), "[node1.lab]:2222"),
        (line(paramiko.HostKeys.hash_host("node1")), "node1"),
        (line(paramiko.HostKeys.hash_host("[node1]:2222")), "[node1]:2222"),
        (line("node1", OTHER) + line("node1"), "node1"),  # one of several is enough
        ("@revoked " + line("*", OTHER) + line("node1"), "node1"),  # of another key
    ],
)
def test_a_known_key_is_accepted(tmp_path: Path, text: str, name: str) -> None:
    known_hosts.check(route(tmp_path, f"# comment\n\nnonsense\n{text}", name), KEY, accept_new=False)


@pytest.mark.parametrize(
    "names",
    [
        "node2",
        "node1.lab",
        "node*,!node1",
        "[node1]:2222",
        "[n]ode1",
        paramiko.HostKeys.hash_host("x"),
        "|1|a|b",
        "|1|ä|ö",
    ],
)
def test_lines_about_other_hosts_do_not_count(tmp_path: Path, names: str) -> None:
    with pytest.raises(HostAccessError, match="its host key is not known: ecdsa-sha2-nistp256 SHA256:"):
        known_hosts.check(route(tmp_path, line(names)), KEY, accept_new=False)


def test_an_unknown_host_is_refused_with_its_fingerprint_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HostAccessError) as refused:
        known_hosts.check(route(tmp_path, ""), KEY, accept_new=False)
    assert KEY.fingerprint in refused.value.what
    assert refused.value.where == "node1 (10.0.0.1:22)"
    assert "`ssh node1`" in refused.value.hint
    assert "host_keys: accept-new" in refused.value.hint


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_changed_key_is_always_refused_with_file_and_line(tmp_path: Path, accept_new: bool) -> None:
    here = route(tmp_path, "# first\n" + line("node1", OTHER))
    with pytest.raises(HostAccessError) as refused:
        known_hosts.check(here, KEY, accept_new=accept_new)
    assert "its host key has changed" in refused.value.what
    assert f"{tmp_path}/known:2" in refused.value.what
    assert f"ssh-keygen -R 'node1' -f {tmp_path}/known" in refused.value.hint
    assert (tmp_path / "known").read_text() == "# first\n" + line("node1", OTHER)


@pytest.mark.parametrize("accept_new", [False, True])
def test_another_type_of_key_than_the_known_one_is_a_changed_key(tmp_path: Path, accept_new: bool) -> None:
    with pytest.raises(HostAccessError, match="has changed"):
        known_hosts.check(route(tmp_path, line("node1", RSA)), KEY, accept_new=accept_new)


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_revoked_key_is_refused_even_if_it_is_known(tmp_path: Path, accept_new: bool) -> None:
    here = route(tmp_path, line("node1") + "@revoked " + line("*"))
    with pytest.raises(HostAccessError, match=r"its host key is revoked: SHA256:.*known:2"):
        known_hosts.check(here, KEY, accept_new=accept_new)


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_host_known_by_its_authority_alone_is_refused_and_says_so(tmp_path: Path, accept_new: bool) -> None:
    here = route(tmp_path, "@cert-authority " + line("node*", OTHER))
    with pytest.raises(HostAccessError, match=r"certificate authority alone \(.*known:1\), which orc cannot check"):
        known_hosts.check(here, KEY, accept_new=accept_new)
    known_hosts.check(route(tmp_path, "@cert-authority " + line("node*", OTHER) + line("node1")), KEY, accept_new=False)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostAccessError, match=r"known:1: a known host key is damaged"):
        known_hosts.check(route(tmp_path, "node1 ssh-ed25519 AAA!\n"), KEY, accept_new=False)


def test_a_new_host_is_remembered_in_the_first_file(tmp_path: Path) -> None:
    here = replace(route(tmp_path, ""), known_hosts=(str(tmp_path / "new" / "known"), str(tmp_path / "known")))
    known_hosts.check(here, KEY, accept_new=True)
    file = tmp_path / "new" / "known"
    assert file.read_text() == f"node1 {KEY.get_name()} {KEY.get_base64()}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    known_hosts.check(here, KEY, accept_new=False)
    with pytest.raises(HostAccessError, match="has changed"):
        known_hosts.check(here, OTHER, accept_new=True)


def test_what_is_in_the_file_stays_when_a_host_is_added(tmp_path: Path) -> None:
    here = route(tmp_path, line("node2", OTHER).rstrip("\n"))
    known_hosts.check(here, KEY, accept_new=True)
    assert (tmp_path / "known").read_text().splitlines() == [
        line("node2", OTHER).rstrip("\n"),
        f"node1 {KEY.get_name()} {KEY.get_base64()}",
    ]


def test_a_new_host_is_remembered_under_a_hashed_name_when_asked_to(tmp_path: Path) -> None:
    here = replace(route(tmp_path, ""), hash_known_hosts=True)
    known_hosts.check(here, KEY, accept_new=True)
    text = (tmp_path / "known").read_text()
    assert text.startswith("|1|")
    assert "node1" not in text
    known_hosts.check(here, KEY, accept_new=False)
    assert paramiko.HostKeys(str(tmp_path / "known")).check("node1", KEY), "others can read it too"


def test_many_who_meet_a_new_host_at_once_write_one_line(tmp_path: Path) -> None:
    here = route(tmp_path, "")
    gate = threading.Barrier(16)

    def meet() -> None:
        gate.wait()
        known_hosts.check(here, KEY, accept_new=True)

    threads = [threading.Thread(target=meet) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / "known").read_text().splitlines()) == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    here = replace(route(tmp_path, ""), known_hosts=(str(tmp_path / "file" / "known"),))
    with pytest.raises(HostAccessError, match=r"file/known: its host key cannot be remembered"):
        known_hosts.check(here, KEY, accept_new=True)


def test_the_types_of_the_known_keys_are_asked_for_first(tmp_path: Path) -> None:
    here = route(tmp_path, line("node1", RSA) + line("node1") + "@revoked " + line("node1", OTHER))
    known = known_hosts.entries("node1", here.known_hosts)
    assert known_hosts.key_types(known) == ["rsa-sha2-512", "rsa-sha2-256", "ssh-rsa", "ecdsa-sha2-nistp256"]
