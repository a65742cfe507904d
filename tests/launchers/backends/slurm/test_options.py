"""Every option is checked where it is written, and nothing can smuggle a line into the batch script."""

from __future__ import annotations

from typing import Any

import pytest

from orc.launchers.backends.slurm import SlurmBackend
from orc.launchers.backends.slurm.options import read_options, read_settings
from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.routes import ConnectOptions, HostSpec
from orc.launchers.spec.clusters import Account, Cluster


def job_options(**values: Any):
    return read_options({}, values, job_where="digits: resources.options.slurm")


def test_the_job_s_value_replaces_the_cluster_s() -> None:
    options = read_options({"partition": "cpu", "account": "research"}, {"partition": "gpu"})
    assert (options.partition, options.account) == ("gpu", "research")


def test_a_job_s_memory_replaces_the_cluster_s_in_another_form() -> None:
    options = read_options({"mem_per_cpu": "2G"}, {"mem_per_gpu": "40G"})
    assert (options.mem_per_cpu, options.mem_per_gpu) == (None, "40G")


def test_extra_options_of_cluster_and_job_are_joined_and_the_job_s_win() -> None:
    options = read_options(
        {"extra": {"hint": "nomultithread", "spread-job": True}}, {"extra": ["--hint=compute_bound"]}
    )
    assert dict(options.extra) == {"hint": "compute_bound", "spread-job": None}


def test_null_means_not_given() -> None:
    assert job_options(partition=None).partition is None


def test_lists_become_one_word() -> None:
    options = job_options(partition=["gpu", "cpu"], exclude=["node1", "node2"], mail_type=["END", "FAIL"])
    assert (options.partition, options.exclude, options.mail_type) == ("gpu,cpu", "node1,node2", "END,FAIL")


def test_generic_resources_may_stand_in_one_text() -> None:
    for given in ("nvme:1,shard:2", ["nvme:1", "shard:2"], ["nvme:1,shard:2"]):
        assert job_options(gres=given).gres == ("nvme:1", "shard:2")


@pytest.mark.parametrize("spelling", ["mail-user", "mail_user"])
def test_dashes_and_underscores_are_the_same(spelling: str) -> None:
    assert job_options(**{spelling: "me@example.org"}).mail_user == "me@example.org"


@pytest.mark.parametrize(
    ("given", "pairs"),
    [
        (["--hint=nomultithread", "--spread-job"], (("hint", "nomultithread"), ("spread-job", None))),
        (["#SBATCH --hint=nomultithread"], (("hint", "nomultithread"),)),
        ("--hint=nomultithread", (("hint", "nomultithread"),)),
        (
            {"hint": "nomultithread", "spread_job": True, "overcommit": False},
            (("hint", "nomultithread"), ("spread-job", None)),
        ),
        ({"cores-per-socket": 8}, (("cores-per-socket", "8"),)),
        (["--extra=rack=3", "--container=/bundle"], (("extra", "rack=3"), ("container", "/bundle"))),
    ],
)
def test_other_options_can_be_written_in_several_ways(given: Any, pairs: Any) -> None:
    assert job_options(extra=given).extra == pairs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partitoin": "gpu"}, ["unknown key 'partitoin'", "did you mean 'partition'?"]),
        ({"qqq": 1}, ["unknown key 'qqq'", "the keys here are", "extra"]),
        ({"job-name": "x"}, ["unknown key 'job-name'", "how orc finds the job again"]),
        ({"partition": "gpu\n#SBATCH --uid=0"}, ["partition:", "must be one line"]),
        ({"comment": "a\nrm -rf /"}, ["comment:", "must be one line"]),
        ({"account": "a b"}, ["account:", "must not contain blanks"]),
        ({"account": ""}, ["account:", "must not be empty"]),
        ({"requeue": "yes"}, ["requeue:", "expected true or false, not 'yes'"]),
        ({"nice": "high"}, ["nice:", "whole number"]),
        ({"signal_lead": "soon"}, ["signal_lead:", "'soon' is not a duration"]),
        ({"signal_lead": 70000}, ["signal_lead:", "expected 0 to 65535 seconds"]),
        ({"exclusive": "maybe"}, ["exclusive:", "expected true, false, user, mcs or topo"]),
        ({"gpu_type": "a100,b"}, ["gpu_type:", "not a GPU type"]),
        ({"mem_per_cpu": 4096}, ["mem_per_cpu:", "has no unit"]),
        ({"export": ["A=B"]}, ["export:", "'A=B' is not the name of a variable"]),
        ({"srun_args": ["cpu-bind=none"]}, ["srun_args:", "is not an option"]),
        ({"extra": ["-p gpu"]}, ["extra:", "not a long option"]),
        ({"extra": ["--hint=a\nb"]}, ["extra:", "must be one line"]),
        ({"extra": {"job-name": "x"}}, ["--job-name is set by orc", "finds the job again"]),
        ({"extra": ["--output=/tmp/x"]}, ["--output is set by orc", "orc logs"]),
        ({"extra": ["--partition=gpu"]}, ["--partition has a key of its own: `partition`"]),
        ({"extra": ["--gpus-per-node=2"]}, ["use `resources.gpus_per_node`"]),
        ({"extra": ["--gpus=2"]}, ["--gpus is set by orc", "may give one node more of a total than another"]),
        ({"extra": ["--gpus-per-task=2"]}, ["--gpus-per-task is set by orc", "gpus_as"]),
        ({"extra": ["--mem=4G"]}, ["--mem has a key of its own: `mem`"]),
        ({"extra": {"time-min": 5}}, ["--time-min is set by orc", "use `resources.time`"]),
        ({"extra": {"clusters": "b"}}, ["--clusters is set by orc", "describe each Slurm cluster by itself"]),
        ({"mem": "16G"}, ["mem: only 0", "use resources.memory"]),
        ({"mem_per_gpu": 4}, ["mem_per_gpu:", "has no unit"]),
        ({"gpus_as": "gpu"}, ["gpus_as: expected 'gres', 'gpus-per-node' or 'gpus-per-task', not 'gpu'"]),
        ({"container_mounts": ["a,b"]}, ["container_mounts[0]: 'a,b' is not a mount"]),
        ({"container_image": "a b"}, ["container_image:", "must not contain blanks"]),
        ({"container_writable": "yes"}, ["container_writable:", "expected true or false"]),
        ({"srun_args": ["-n4"]}, ["srun_args: -n4 is set by orc", "resources.procs_per_node"]),
        ({"srun_args": ["--ntasks=4"]}, ["srun_args: --ntasks=4 is set by orc"]),
        ({"srun_args": ["--output=/tmp/x"]}, ["--output=/tmp/x is set by orc", "orc logs"]),
        ({"srun_args": ["--container-image=x"]}, ["keys of their own", "container_image"]),
        ({"extra": ["--outp=/tmp/x"]}, ["--outp is set by orc", "orc logs"]),
        ({"extra": ["--part=gpu"]}, ["--part has a key of its own: `partition`"]),
        ({"extra": ["--help"]}, ["--help is set by orc", "nothing is submitted"]),
        ({"srun_args": ["--ntask=4"]}, ["--ntask=4 is set by orc", "resources.procs_per_node"]),
        ({"srun_args": ["-V"]}, ["-V is set by orc", "nothing is started"]),
        ({"srun_args": ["--het-group=0"]}, ["--het-group=0 is set by orc", "heterogeneous"]),
        ({"gres": "nvme:1,,shard:2"}, ["gres:", "empty entry"]),
        ({"extra": ["--Hint=x"]}, ["--Hint is not an option"]),
        ({"extra": 5}, ["extra:", "expected a list of --options, or a mapping"]),
    ],
)
def test_a_bad_option_names_key_place_and_remedy(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        job_options(**options)
    text = str(caught.value)
    assert text.startswith("digits: resources.options.slurm: ")
    for word in words:
        assert word in text


def test_settings_of_the_cluster_are_refused_in_a_job() -> None:
    with pytest.raises(SpecError, match="'conf' describes the cluster, not the job") as caught:
        job_options(conf="/etc/slurm/slurm.conf")
    assert "clusters.yaml" in caught.value.hint


def test_settings_are_told_apart_from_job_options() -> None:
    given = {"conf": "/etc/other.conf", "query_timeout": "30s", "partition": "gpu", "accounting": False}
    settings = read_settings(given)
    assert (settings.conf, settings.query_timeout, settings.accounting) == ("/etc/other.conf", 30.0, False)
    assert read_options(given, {}).partition == "gpu"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"conf": "slurm.conf"}, "conf: 'slurm.conf' must be an absolute path"),
        ({"query_timeout": 0}, "query_timeout: expected 1 to 3600 seconds"),
        ({"accounting": 1}, "accounting: expected true or false"),
    ],
)
def test_a_bad_setting_names_the_cluster(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_settings(given, where="cluster hpc: options")
    assert str(caught.value).startswith(f"cluster hpc: options: {message}")


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ("login1", HostSpec("login1")),
        ("me@login1", HostSpec("login1", user="me")),
        (
            {
                "name": "hpc",
                "address": "10.0.0.1",
                "user": "me",
                "port": 2222,
                "via": "gate,me@inner:22",
                "python": "py",
            },
            HostSpec("hpc", "10.0.0.1", "me", 2222, "gate,me@inner:22", "py"),
        ),
    ],
)
def test_the_login_node_is_a_host_like_those_of_kind_ssh(given: Any, spec: HostSpec) -> None:
    settings = read_settings({"login": given, "host_keys": "accept-new", "connect_timeout": "3s"})
    assert settings.login is not None
    assert settings.login.spec() == spec
    assert settings.access == ConnectOptions("accept-new", None, 3.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"login": 5}, "login: expected a mapping of keys and values, not 5"),
        ({"login": "-oProxyCommand=x"}, "login.name: '-oProxyCommand=x' is not the name of a host"),
        ({"login": {"user": "me"}}, "login: the key 'name' is required"),
        ({"login": {"name": "a", "prot": 22}}, "login: unknown key 'prot', did you mean 'port'?"),
        (
            {"login": {"name": "a", "port": 0, "via": "b c"}},
            "login.port: must be at least 1, not 0\ncluster hpc: options: login.via: 'b c'",
        ),
        ({"host_keys": "none"}, "host_keys: expected 'strict' or 'accept-new', not 'none'"),
        ({"ssh_config": "config"}, "ssh_config: 'config' is not an absolute path"),
        ({"connect_timeout": 0}, "connect_timeout: expected 0.1 to 600 seconds"),
    ],
)
def test_a_bad_login_node_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_settings(given, where="cluster hpc: options")
    assert str(caught.value).startswith(f"cluster hpc: options: {message}")


def test_a_misspelt_setting_is_found_among_the_cluster_s_options() -> None:
    with pytest.raises(SpecError, match="did you mean 'query_timeout'"):
        read_options({"query_timeuot": 3}, {})


def test_an_account_logs_in_on_the_login_node_and_nowhere_else() -> None:
    options = {"login": "orc@login1", "account": "shared"}
    shared = Cluster(name="lab", kind="slurm", root="/shared/orc", options=options)
    account = Account(user="ada", root="~/orc", options={"account": "physics"})
    own = SlurmBackend(shared.of_account(account))
    assert (own._settings.login.user, own._settings.login.name, own.root) == ("ada", "login1", "~/orc")
    assert own.cluster.options["account"] == "physics"
    assert (own.addresses(), SlurmBackend(shared).addresses()) == ({"user of login1": "ada"}, {})
    with pytest.raises(SpecError, match="only behind a login node"):
        SlurmBackend(Cluster(name="lab", kind="slurm").of_account(account))
