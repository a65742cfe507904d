"""Hours times prices: by whatever, over midnight, with unknown prices, while attempts run."""

from __future__ import annotations

import datetime

import pytest

from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.insight.costs import add_up
from orc.orchestrator.ledger.usage import Usage

NOON = datetime.datetime(2026, 3, 1, 12).timestamp()
CLUSTERS = {
    "gpu": Cluster(name="gpu", kind="slurm", prices={"gpu_hour": 2, "node_hour": 1, "currency": "EUR"}),
    "cloud": Cluster(
        name="cloud", kind="sagemaker", prices={"instance_hour": {"ml.p4d": 30}}, options={"instance_type": "ml.g5"}
    ),
    "free": Cluster(name="free", kind="ssh"),
}


def usage(
    job="j1", *, cluster="gpu", hours=2.0, begin=NOON, gpus=4, hosts=2, owner="ann", instance=None, running=False
):
    resources = {"nodes": 2, "gpus_per_node": gpus}
    if instance:
        resources["options"] = {"sagemaker": {"instance_type": instance}}
    end = None if running else begin + hours * 3600
    return Usage(job, 1, owner, "vision", cluster, 2, begin, end, {"resources": resources}, {"team": "a"})


def total(*usages, by="job", **options):
    return add_up(usages, CLUSTERS, by=by, now=NOON + 3600, **options)["total"]


def test_nodes_and_their_gpus_are_added_up():
    found = total(usage())
    assert (found["node_hours"], found["gpu_hours"], found["cost"]) == (4.0, 16.0, {"EUR": 36.0})


def test_the_type_of_a_machine_has_a_price_of_its_own_and_none_is_unknown():
    assert total(usage(cluster="cloud", instance="ml.p4d"))["cost"] == {"USD": 120.0}
    unknown = total(usage(cluster="cloud"), usage("j2", cluster="free"), usage("j3", cluster="gone"))
    assert (unknown["cost"], unknown["unpriced_node_hours"]) == (None, 12.0)


def test_an_attempt_that_runs_counts_until_now():
    found = total(usage(running=True))
    assert (found["node_hours"], found["running"]) == (2.0, True)


def test_an_attempt_over_midnight_belongs_to_two_days():
    found = add_up([usage(begin=NOON + 11 * 3600, hours=3)], CLUSTERS, by="day", now=NOON)
    assert [(group["key"], group["node_hours"]) for group in found["groups"]] == [
        ("2026-03-01", 2.0),
        ("2026-03-02", 4.0),
    ]
    assert found["total"]["attempts"] == 1


def test_only_the_hours_between_two_moments_count():
    found = total(usage(hours=10), since=NOON + 3600, until=NOON + 7200)
    assert found["node_hours"] == 2.0


@pytest.mark.parametrize(("by", "keys"), [("user", ["bob", "ann"]), ("project", ["vision"]), ("tag:team", ["a"])])
def test_groups_come_with_the_dearest_first(by, keys):
    found = add_up([usage(), usage("j2", owner="bob", hours=9)], CLUSTERS, by=by, now=NOON)
    assert [group["key"] for group in found["groups"]] == keys
