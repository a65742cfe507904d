"""Partitions, expected starts and first entries for clusters.yaml, from what several Slurm versions print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orc.launchers.backends.base import PartitionReport, QueuedJob
from orc.launchers.backends.slurm.discovery import ClusterFacts, entry, entry_name
from orc.launchers.backends.slurm.options import read_options, read_settings
from orc.launchers.backends.slurm.queue_rows import parse_sinfo, parse_squeue
from orc.launchers.backends.slurm.verdict import queued_job
from orc.launchers.errors import LaunchError
from orc.launchers.spec.clusters import load_clusters

SINFO = """\
cpu*|up|2|1/1|4/12/0/16|1-00:00:00|(null)|64
cpu*|up|2|0/2|0/16/0/16|1-00:00:00|gpu:a100:4|8
gpu|up|2|0/2|0/16/0/16|infinite|gpu:a100:4(S:0-1)|8
old|drain|10|0/0|0/0/40/40|1:00||?
PARTITION|of|another shape
"""


def test_groups_of_nodes_of_one_partition_are_joined() -> None:
    assert parse_sinfo(SINFO) == [
        PartitionReport("cpu", True, "up", 4, 3, 32, 28, 86400.0, ("gpu:a100:4",), (2,), 64),
        PartitionReport("gpu", False, "up", 2, 2, 16, 16, None, ("gpu:a100:4(S:0-1)",), (2,), 8),
        PartitionReport("old", False, "drain", 10, 0, 40, 0, 60.0, ()),
    ]


def test_resources_that_some_nodes_have_are_not_counted_for_all() -> None:
    cpu, gpu, _ = parse_sinfo(SINFO)
    assert cpu.resources == ("gpu:a100:4 on 2 of 4 nodes",)
    assert gpu.resources == ("gpu:a100:4(S:0-1) per node",)


def test_expected_starts_are_read_and_reasons_explained() -> None:
    text = """\
12|a|PENDING|1|1700000000|N/A|30:00||cpu|2|Resources
13|b|PENDING|1|N/A|N/A|30:00||cpu|64|PartitionNodeLimit
14|c|RUNNING|1|1600000000|1600001800|30:00|node1|gpu|1|None
slurm_load_jobs error: something
"""
    hopeless = "PartitionNodeLimit: the partition allows fewer nodes or less per node; it may wait for ever"
    assert [queued_job(f"orc-{row.name}-000000-a1", row) for row in parse_squeue(text)] == [
        QueuedJob("orc-a-000000-a1", "12", "PENDING", "cpu", 2, "Resources", 1.7e9),
        QueuedJob("orc-b-000000-a1", "13", "PENDING", "cpu", 64, hopeless),
        QueuedJob("orc-c-000000-a1", "14", "RUNNING", "gpu", 1, "", 1.6e9),
    ]


def facts(**more: Any) -> ClusterFacts:
    values: dict[str, Any] = {
        "cluster": "hpc",
        "version": "slurm 23.11.4",
        "accounting": True,
        "partitions": tuple(parse_sinfo(SINFO)),
        "account": "research",
        "accounts": ("closed", "research"),
        "python": "/usr/bin/python3",
    }
    return ClusterFacts(**{**values, **more})


def test_an_entry_says_what_may_be_changed() -> None:
    assert entry("hpc", facts(), {"login": "me@hpc.example.org"}) == (
        "hpc:  # slurm 23.11.4\n"
        "  kind: slurm\n"
        "  root: ~/orc  # must be on a file system that the login node and all nodes share\n"
        "  python: /usr/bin/python3  # on the nodes; must have torch\n"
        "  options:\n"
        "    login: me@hpc.example.org\n"
        "    account: research  # yours: closed, research\n"
        "    partition: cpu  # or another of these:\n"
        "    #   cpu: 4 nodes, 32 cores, at most 1 d 0:00:00, gpu:a100:4 on 2 of 4 nodes\n"
        "    #   gpu: 2 nodes, 16 cores, no time limit, gpu:a100:4(S:0-1) per node\n"
        "    #   old: 10 nodes, 40 cores, at most 0:01:00, drain\n"
    )


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {"account": "research", "partition": "cpu"}),
        ({"accounting": False, "account": "", "accounts": ()}, {"partition": "cpu", "accounting": False}),
        ({"account": "", "accounts": ("a", "b")}, {"account": "a", "partition": "cpu"}),
        ({"account": "on", "accounts": ("on",)}, {"account": "on", "partition": "cpu"}),
        ({"account": "1234", "accounts": ("1234",)}, {"account": "1234", "partition": "cpu"}),
        ({"account": "12e3", "accounts": ("12e3",)}, {"account": "12e3", "partition": "cpu"}),
        ({"account": "a # b: c".replace(" ", ""), "accounts": ()}, {"account": "a#b:c", "partition": "cpu"}),
    ],
)
def test_an_entry_is_read_back_as_it_was_meant(more: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    text = entry("hpc", facts(**more), {})
    assert yaml.safe_load(text)["hpc"]["options"] == options
    (tmp_path / "clusters.yaml").write_text(text)
    assert load_clusters(tmp_path / "clusters.yaml")["hpc"].options == options
    read_settings(options)
    read_options(options, {})


def test_odd_names_get_an_ordinary_one() -> None:
    assert [entry_name(facts(cluster=name)) for name in ("hpc", "", "local", "ein Name")] == ["hpc", *["slurm"] * 3]


@pytest.mark.parametrize("more", [{"partitions": ()}, {"account": "a b", "accounts": ()}])
def test_what_makes_no_entry_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(LaunchError):
        entry("hpc", facts(**more), {})
