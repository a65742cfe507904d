"""Hours times prices: by whatever, over midnight, with unknown prices."""

from __future__ import annotations

import datetime

import pytest

from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.engine.usage import Use
from orc.orchestrator.insight.costs import add_up

NOON = datetime.datetime(2026, 3, 1, 12).timestamp()
CLUSTERS = {
    "gpu": Cluster(name="gpu", kind="slurm", prices={"gpu_hour": 2, "node_hour": 1, "currency": "EUR"}),
    "cloud": Cluster(
        name="cloud", kind="sagemaker", prices={"instance_hour": {"ml.p4d": 30}}, options={"instance_type": "ml.g5"}
    ),
    "free": Cluster(name="free", kind="ssh"),
}


def use(key="j1", *, cluster="gpu", hours=2.0, begin=NOON, machine=""):
    """Two nodes of four GPUs for so many hours."""
    return Use(key, cluster, 4, machine, 1, 1, 2 * hours * 3600, False, begin, begin + hours * 3600)


def total(*uses, by="job"):
    return add_up(uses, CLUSTERS, by)["total"]


def test_nodes_and_their_gpus_are_added_up():
    found = total(use())
    assert (found["node_hours"], found["gpu_hours"], found["cost"]) == (4.0, 16.0, {"EUR": 36.0})


def test_the_type_of_a_machine_has_a_price_of_its_own_and_none_is_unknown():
    assert total(use(cluster="cloud", machine="ml.p4d"))["cost"] == {"USD": 120.0}
    unknown = total(use(cluster="cloud"), use("j2", cluster="free"), use("j3", cluster="gone"))
    assert (unknown["cost"], unknown["unpriced_node_hours"]) == (None, 12.0)


def test_an_attempt_over_midnight_belongs_to_two_days():
    again = use(begin=NOON + 20 * 3600)._replace(jobs=0)  # the second attempt of a job, of which the total knows
    found = add_up([use(begin=NOON + 11 * 3600, hours=3), again], CLUSTERS, "day")
    assert [(group["key"], group["node_hours"], group["jobs"]) for group in found["groups"]] == [
        ("2026-03-01", 2.0, 1),
        ("2026-03-02", 8.0, 1),
    ]
    assert (found["total"]["attempts"], found["total"]["jobs"]) == (2, 1)


@pytest.mark.parametrize("by", ["user", "tag:team"])
def test_groups_come_with_the_dearest_first(by):
    found = add_up([use("ann"), use("bob", hours=9)], CLUSTERS, by)
    assert [group["key"] for group in found["groups"]] == ["bob", "ann"]
