"""The hosts of a cluster of kind ssh, as clusters.yaml and hostfiles describe them, and complaints about both."""

from __future__ import annotations

from pathlib import Path

import pytest

from orc.launchers.backends import open_backend
from orc.launchers.backends.ssh.settings import parse_hostfile, read_job_options, read_settings
from orc.launchers.errors import SpecError
from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import Account, Cluster, get_cluster

LAB = """\
lab:
  kind: ssh
  python: /opt/venv/bin/python
  options:
    user: trainer
    slots: 2
    hosts:
      - node1
      - me@node2
      - {name: "gpu[09-10]", slots: 8, labels: [a100, nvlink], python: ~/py/bin/python, root: /fast/orc}
      - {name: far, address: fd00::7, port: 2222, via: "ops@bastion:22,inner"}
"""


@pytest.fixture
def clusters_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "clusters.yaml"
    monkeypatch.setenv("ORC_CLUSTERS", str(path))
    return path


def complaint(clusters_yaml: Path, text: str) -> str:
    clusters_yaml.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_settings(get_cluster("lab"))
    return str(caught.value).replace(f"{clusters_yaml.parent}/", "")


def test_an_account_logs_in_as_itself_everywhere(cluster) -> None:
    shared = cluster(user="orc", hosts=["a", "me@b", {"name": "c", "user": "you", "root": "/c"}])
    own = read_settings(shared.of_account(Account(user="ada", root="~/orc")))
    assert [(host.user, own.root_of(host.name)) for host in own.hosts] == [("ada", "~/orc")] * 3
    assert [host.user for host in read_settings(shared).hosts] == ["orc", "me", "you"]


def test_hosts_are_listed_by_name_by_range_or_in_full(clusters_yaml: Path) -> None:
    clusters_yaml.write_text(LAB)
    lab = read_settings(get_cluster("lab"))
    assert lab.names == ("node1", "node2", "gpu09", "gpu10", "far")
    assert [(host.user, host.slots) for host in lab.hosts] == [
        ("trainer", 2),
        ("me", 2),
        ("trainer", 8),
        ("trainer", 8),
        ("trainer", 2),
    ]
    assert lab.host("gpu10").labels == ("a100", "nvlink")
    assert (lab.python_of("gpu10"), lab.python_of("node1")) == ("~/py/bin/python", "/opt/venv/bin/python")
    assert (lab.root_of("gpu10"), lab.root_of("node1")) == ("/fast/orc", "~/.local/state/orc")
    far = lab.host("far")
    assert (far.where, far.port, far.via) == ("fd00::7", 2222, "ops@bastion:22,inner")


def test_the_home_directory_of_this_machine_means_nothing_on_the_hosts(clusters_yaml: Path) -> None:
    clusters_yaml.write_text("lab: {kind: ssh, root: ~/orc, options: {hosts: [a]}}\nhere: {kind: local, root: ~/orc}\n")
    assert get_cluster("lab").root == "~/orc"
    assert open_backend(get_cluster("here")).root.startswith("/")


def test_a_host_takes_one_job_at_a_time_unless_slots_are_given(settings) -> None:
    assert [host.slots for host in settings().hosts] == [0, 0, 0]
    assert [host.slots for host in settings(slots=4, hosts=["a", {"name": "b", "slots": 1}]).hosts] == [4, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{hots: [a]}", "clusters.yaml:2:12: unknown key 'hots', did you mean 'hosts'?"),
        (
            "{hosts: [a, {name: b, slotz: 2}]}",
            "clusters.yaml:2:33: hosts[1]: unknown key 'slotz', did you mean 'slots'",
        ),
        ("{hosts: [{slots: 2}]}", "clusters.yaml:2:20: hosts[0]: the key 'name' is required"),
        (
            "{hosts: [-oProxyCommand=x]}",
            "clusters.yaml:2:20: hosts[0].name: '-oProxyCommand=x' is not the name of a host",
        ),
        ("{hosts: ['n[5-2]']}", "hosts[0].name: 'n[5-2]': 5 to 2 is no range of hosts"),
        ("{hosts: [a], slots: -1}", "clusters.yaml:2:31: slots: must be at least 0, not -1"),
        ("{hosts: [a], host_keys: never}", "host_keys: expected 'strict' or 'accept-new', not 'never'"),
        ("{hosts: [a], peer_timeout: 1}", "peer_timeout: expected 2 to 3600 seconds, not 1"),
        ("{hosts: [{name: a, root: orc}]}", "hosts[0].root: 'orc' is not an absolute path"),
        ("{hosts: [{name: a, port: 0}]}", "hosts[0].port: must be at least 1, not 0"),
        ("{hosts: [{name: a, via: '-x'}]}", "hosts[0].via: '-x' is not a jump host"),
        ("{hosts: [{name: a, user: '$(id)'}]}", "hosts[0].user: '$(id)' is not the name of a user"),
        ("{hosts: ['`id`@a']}", "hosts[0].user: '`id`' is not the name of a user"),
        ("{hosts: [a], user: 'me;id'}", "user: 'me;id' is not the name of a user"),
        ("{hosts: [{name: a, address: 'b|id'}]}", "hosts[0].address: 'b|id' is not the name of a host"),
        ("{hosts: [{name: a, via: 'b,$(id)@c'}]}", "hosts[0].via: 'b,$(id)@c' is not a jump host"),
        ("{hosts: [a, b, a]}", "clusters.yaml:2:19: hosts: a is listed twice"),
        ("{hosts: []}", "the cluster lab has no hosts"),
        ("{hostfile: /no/such}", "clusters.yaml:2:22: hostfile: /no/such cannot be read: No such file or directory"),
    ],
)
def test_mistakes_are_named_with_file_line_and_the_nearest_key(clusters_yaml: Path, options: str, said: str) -> None:
    assert said in complaint(clusters_yaml, f"lab: {{kind: ssh, root: /r,\n options: {options}}}\n")


def test_every_mistake_is_named_at_once(clusters_yaml: Path) -> None:
    said = complaint(clusters_yaml, "lab:\n  kind: ssh\n  options:\n    hosts: [{name: a, ports: 22}]\n    sluts: 1\n")
    assert "clusters.yaml:4:23: hosts[0]: unknown key 'ports', did you mean 'port'?" in said
    assert "clusters.yaml:5:5: unknown key 'sluts', did you mean 'slots'?" in said


def test_an_mpi_hostfile_gives_slots() -> None:
    hosts = parse_hostfile(
        "# the lab\nnode1 slots=4 max_slots=4\nnode2:2\n\nme@node3  label=a100 label=big # new\n", "hosts"
    )
    assert [(h.name, h.slots, h.user, h.labels) for h in hosts] == [
        ("node1", 4, None, ()),
        ("node2", 2, None, ()),
        ("node3", None, "me", ("a100", "big")),
    ]


@pytest.mark.parametrize(
    "line",
    ["node1 ansible_user=$(id)", "node1 user=me`id`", "node1 ansible_host=a;id", "node1 via=$(id)@b", "-x@node1"],
)
def test_a_hostfile_brings_no_shell_words(line: str) -> None:
    with pytest.raises(SpecError, match=r"hosts:1: (user|address|via|name): '.*' is not"):
        parse_hostfile(line, "hosts")


def test_groups_of_an_inventory_are_labels() -> None:
    text = """\
[gpu]
gpu[1:2] ansible_user=me ansible_host=10.0.0.1 ansible_become=yes
[big]  ; a comment
gpu2
node1 ansible_port=2222 ansible_python_interpreter=/opt/python
[gpu:vars]
ansible_user=root
[all:children]
gpu
"""
    hosts = {host.name: host for host in parse_hostfile(text, "inventory.ini")}
    assert list(hosts) == ["gpu1", "gpu2", "node1"]
    assert hosts["gpu2"].labels == ("gpu", "big")
    assert (hosts["gpu1"].user, hosts["gpu1"].address) == ("me", "10.0.0.1")
    assert (hosts["node1"].port, hosts["node1"].python) == (2222, "/opt/python")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("node1 slost=4", "hosts:2: unknown key 'slost', did you mean 'slots'?"),
        ("node1 slots=many", "hosts:2: slots: 'many' is not a whole number"),
        ("node1 slots", "hosts:2: slots: expected slots=value"),
        ("-oProxyCommand=x", "hosts:2: name: '-oProxyCommand=x' is not the name of a host"),
        ("node1 'half", "hosts:2: not a line of a hostfile: No closing quotation"),
        ("first port=23", "hosts:2: first: port is 23 here and 22 above"),
    ],
)
def test_mistakes_in_a_hostfile_are_named_with_their_line(line: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_hostfile(f"first port=22\n{line}\n", "hosts")
    assert str(caught.value) == said


def test_a_hostfile_adds_to_the_listed_hosts(settings, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("d slots=3\n")
    lab = settings(hosts=["a"], hostfile=str(tmp_path / "hosts"), user="trainer")
    assert [(host.name, host.slots, host.user) for host in lab.hosts] == [("a", 0, "trainer"), ("d", 3, "trainer")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{host: [a]}", "job.yaml:5:11: unknown key 'host', did you mean 'hosts'?"),
        ("{slots: many}", "job.yaml:5:18: slots: expected a whole number, not 'many'"),
        ("{hosts: [a, bb]}", "job.yaml:5:22: hosts: no host 'bb' in the cluster, did you mean 'b'?"),
        ("{exclude: d}", "job.yaml:5:20: exclude: no host 'd' in the cluster; known are a, b, c"),
        ("{labels: a100}", "job.yaml:5:19: labels: no host has the label 'a100'; the cluster's hosts have no labels"),
        ("{slots: 0}", "job.yaml:5:18: slots: must be at least 1, not 0"),
    ],
)
def test_mistakes_in_a_job_files_options_are_named_with_their_place(
    settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("job.yaml").write_text(f"name: x\nscript: train.py\nresources:\n  options:\n    ssh: {options}\n")
    with pytest.raises(SpecError) as caught:
        read_job_options(load_job("job.yaml").spec, settings())
    assert str(caught.value).startswith(said)


def test_what_makes_the_machines_that_an_attempt_is_sent_to() -> None:
    hosts = [{"name": "a", "address": "10.0.0.1", "port": 2222, "root": "~/orc", "user": "me"}, "me@b"]
    lab = Cluster(name="lab", kind="ssh", root="/scratch/orc", options={"hosts": hosts})
    assert open_backend(lab).addresses(["a", "b", "gone"]) == {
        "address of a": "10.0.0.1",
        "port of a": "2222",
        "user of a": "me",
        "root of a": "~/orc",
        "root of b": "/scratch/orc",
    }
    assert open_backend(lab.of_account(Account(user="ada")).at_root("~/orc")).addresses(["b"]) == {
        "user of b": "ada",
        "root of b": "~/orc",
    }
