"""How full clusters are, as the ledger has it."""

from __future__ import annotations

from prepared_jobs import create_prepared

from orc.launchers.backends.base import Placement
from orc.orchestrator.api.clusters import list_clusters
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.records import NewJob

CLUSTERS = """
local: {}
lab: {kind: ssh, options: {hosts: [{name: n1, slots: 8}, {name: n2, slots: 4}]}}
whole: {kind: ssh, options: {hosts: [n1, n2]}}
broken: {kind: ssh, options: {hosts: [{slots: 4}]}}
"""


def test_slots_of_a_cluster_are_taken_by_what_our_jobs_hold_and_a_host_without_slots_as_a_whole(orc_home):
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text(CLUSTERS)
    with Client() as client, client.workspace.ledger.transaction() as tx:
        for name, cluster, placement in (
            ("a-aaaaaa", "lab", Placement(("n1", "n2"), 3)),
            ("b-bbbbbb", "lab", Placement(("n1",), 2)),
            ("c-cccccc", "whole", Placement(("n2",), 16)),
        ):
            job = NewJob(name, "digits", cluster, "ssh", "job.yaml", {"name": name}, {}, {}, "here:/state")
            create_prepared(tx, job, f"orc-{name}-a1", "p", "me", tx.now + 60, placement)
    with Client() as client:
        clusters = list_clusters(client.session).clusters
    slots = {cluster.name: (cluster.slots, cluster.slots_taken) for cluster in clusters}
    assert slots == {"local": (None, None), "lab": (12, 8), "whole": (2, 1), "broken": (None, None)}
