"""What the SSH configuration says about a host."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.routes import ConnectOptions, HostSpec, Route, read_config, resolve


def route(tmp_path: Path, text: str, name: str = "node1", **spec: object) -> Route:
    (tmp_path / "config").write_text(text)
    return resolve(HostSpec(name, **spec), read_config([str(tmp_path / "config")]))  # type: ignore[arg-type]


def test_a_host_that_is_not_mentioned_is_reached_by_its_name(tmp_path: Path) -> None:
    found = route(tmp_path, "")
    assert (found.address, found.port, found.user, found.jumps) == ("node1", 22, getpass.getuser(), ())
    assert found.host_key_name == "node1"
    home = os.path.expanduser("~")
    assert found.identities == tuple(f"{home}/.ssh/id_{kind}" for kind in ("ed25519", "ecdsa", "rsa"))
    assert found.known_hosts[0] == f"{home}/.ssh/known_hosts"
    assert "/etc/ssh/ssh_known_hosts" in found.known_hosts


def test_sections_that_match_apply_and_the_first_value_counts(tmp_path: Path) -> None:
    text = """
Host node*
    HostName 10.0.0.%h
    Port 2222
    IdentityFile ~/keys/%r
Host *
    User trainer
    Port 22
    IdentityFile /keys/other
    IdentitiesOnly yes
    IdentityAgent ~/agent
    UserKnownHostsFile ~/known "/with space/known"
    GlobalKnownHostsFile none
    HashKnownHosts yes
"""
    found = route(tmp_path, text)
    home = os.path.expanduser("~")
    assert (found.address, found.port, found.user) == ("10.0.0.node1", 2222, "trainer")
    assert found.identities == (f"{home}/keys/trainer", "/keys/other")
    assert found.identities_only
    assert found.identities_given
    assert found.agent == f"{home}/agent"
    assert found.known_hosts == (f"{home}/known", "/with space/known")
    assert found.hash_known_hosts
    assert found.host_key_name == "[10.0.0.node1]:2222"
    assert found.where == "node1 (10.0.0.node1:2222)"


def test_what_the_cluster_says_counts_more(tmp_path: Path) -> None:
    text = "Host node1\n HostName a\n User b\n Port 1\n ProxyJump c\n"
    found = route(tmp_path, text, address="10.0.0.3", user="me", port=23, via="bastion")
    assert (found.address, found.user, found.port, found.jumps) == ("10.0.0.3", "me", 23, (HostSpec("bastion"),))
    assert found.host_key_name == "[10.0.0.3]:23"


def test_a_host_key_alias_stands_for_the_host_whatever_its_port(tmp_path: Path) -> None:
    assert route(tmp_path, "HostKeyAlias Farm\nPort 99").host_key_name == "farm"


def test_jump_hosts_are_read_in_order(tmp_path: Path) -> None:
    found = route(tmp_path, "Host node1\n ProxyJump me@one:2201,two,[fe80::1]:22,ssh://you@three:3\n")
    assert found.jumps == (
        HostSpec("one", user="me", port=2201),
        HostSpec("two"),
        HostSpec("fe80::1", port=22),
        HostSpec("three", user="you", port=3),
    )


def test_no_jump_host_means_none(tmp_path: Path) -> None:
    assert route(tmp_path, "Host node1\n ProxyJump none\nHost *\n ProxyJump bastion").jumps == ()
    assert route(tmp_path, "ProxyJump bastion", via="none").jumps == ()


def test_a_jump_host_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'a:b' is not a jump host"):
        route(tmp_path, "", via="a:b")


def test_a_proxy_command_is_expanded(tmp_path: Path) -> None:
    text = "Host node1\n HostName far\n Port 24\n User me\n ProxyCommand nc -x proxy %h %p %r"
    assert route(tmp_path, text).proxy_command == "nc -x proxy far 24 me"
    assert route(tmp_path, "ProxyCommand none").proxy_command is None
    found = route(tmp_path, text, address="10.0.0.3", port=25)
    assert found.proxy_command == "nc -x proxy 10.0.0.3 25 me"


@pytest.mark.parametrize(
    "text", ["$(id)", "`id`", "a;b", "a|b", "a&b", "a b", "-oProxyCommand=x", "a\nb", "a'b", 'a"', "", "a>b"]
)
def test_names_that_a_shell_would_act_on_never_become_a_host(text: str) -> None:
    with pytest.raises(SpecError, match="is not the name of a host"):
        HostSpec(text)
    with pytest.raises(SpecError, match="is not the name of a host"):
        HostSpec("node1", address=text)
    with pytest.raises(SpecError, match="is not the name of a user"):
        HostSpec("node1", user=text)


@pytest.mark.parametrize("user", ["me", "me.you_too-3", "me@REALM.ORG", "DOMAIN\\me", "\u00e9l\u00e9na"])
def test_names_that_users_have_are_taken(user: str) -> None:
    assert HostSpec("node1", user=user).user == user


def test_an_impossible_port_never_becomes_a_host() -> None:
    with pytest.raises(SpecError, match="70000 is not a port number"):
        HostSpec("node1", port=70000)


@pytest.mark.parametrize("line", ["User $(id)", "HostName a;id", "ProxyJump `id`@one"])
def test_names_of_the_configuration_are_checked_too(tmp_path: Path, line: str) -> None:
    with pytest.raises(SpecError, match=r"is not the name of a (host|user)"):
        route(tmp_path, f"Host node1\n {line}\n")


def test_included_files_are_read_where_they_are_included(tmp_path: Path) -> None:
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / "10-lab").write_text("Host node1\n  User lab\n  Include deeper\n")
    (tmp_path / "config.d" / "20-all").write_text("Port 2020\nHost other\n  Port 1\n")
    (tmp_path / "deeper").write_text("HostName deep\n")
    text = 'include config.d/*\nCompression yes\nHost node2\n  User two\n  Include "nothing here"\n  Port 7\n'
    found = route(tmp_path, text)
    assert (found.user, found.address, found.port) == ("lab", "deep", 2020)
    found = route(tmp_path, text.replace("config.d/*", "deeper"), name="node2")
    assert (found.user, found.address, found.port) == ("two", "deep", 7)


def test_files_that_include_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="include each other in a circle"):
        route(tmp_path, "Include config")


def test_a_configuration_that_is_not_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config: the SSH configuration cannot be understood: .*nonsense"):
        route(tmp_path, "nonsense")
    with pytest.raises(SpecError, match=r"Port many of node1 .* is not a port number"):
        route(tmp_path, "Port many")


def test_a_named_file_must_exist_the_usual_ones_need_not(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_config([str(tmp_path / "missing")])
    assert resolve(HostSpec("a"), read_config([str(tmp_path / "x"), str(tmp_path / "y")])).address == "a"


def test_the_user_s_file_counts_more_than_the_system_s(tmp_path: Path) -> None:
    (tmp_path / "user").write_text("Host other\n  Port 5\nHost node1\n  User mine\n")
    (tmp_path / "system").write_text("User theirs\nPort 9\n")
    found = resolve(HostSpec("node1"), read_config([str(tmp_path / "user"), str(tmp_path / "system")]))
    assert (found.user, found.port) == ("mine", 9)


def test_the_configuration_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ConnectOptions().config_files() == ("~/.ssh/config", "/etc/ssh/ssh_config")
    monkeypatch.setenv("ORC_SSH_CONFIG", "/elsewhere")
    assert ConnectOptions().config_files() == ("/elsewhere",)
    assert ConnectOptions(ssh_config="/here").config_files() == ("/here",)
