"""The main job, end to end through the command line: on two pods of Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import EPOCH, Orc
from kubernetes_testbed import NAMESPACE, KubernetesTestbed


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_digits_on_two_pods_goes_on_from_its_checkpoint_after_an_eviction(
    kubernetes_testbed: KubernetesTestbed, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    orc = Orc(folder, kubernetes_testbed.cluster())
    orc.init_digits()
    orc.take_time("ORC_ATTEMPT", "1")
    assert "nothing to complain about" in orc("clusters", "check", "k8s")
    size = ("--set", "resources.nodes=2", "--set", "resources.procs_per_node=1", "--set", "launcher=torchrun")
    job = orc.submit(*size)
    orc.until_epoch(job, 2)
    assert job in orc("queue", "--cluster", "k8s")
    words = ("exec", job, "--node", "1", "--", "sh", "-c", "echo node $ORC_NODE_RANK")
    assert "node 1" in orc(*words)
    assert "train.py" in orc("stacks", job)
    kubernetes_testbed.evict(kubernetes_testbed.pods()[0])
    view = orc.until(job, lambda view: view["state"] in ("SUCCEEDED", "FAILED"), timeout_s=400)
    shown = orc.log(job, 0)
    assert view["state"] == "SUCCEEDED", shown + orc("logs", job, "--node", "0")
    assert [attempt["cause"] for attempt in view["attempts"]] == ["preempted", None]
    assert sorted(view["attempts"][1]["exit"]["ranks"]) == ["0", "1"]
    assert "resumed from /mnt/shared/orc/jobs/" in shown
    assert sorted(set(map(int, EPOCH.findall(orc.log(job, 0, "--attempt", "1") + shown)))) == list(range(1, 5))
    accuracy = re.search(r"test accuracy (0\.\d+)", shown)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.9
    assert "k8s" in orc("gc", "--cluster", "k8s", "--dry-run")
    orc("prune", "--cluster", "k8s")
    assert kubernetes_testbed.pods("orc-launch/gate") == []
    assert [each["metadata"]["name"] for each in kubernetes_testbed.store.list("secrets", NAMESPACE)] == []
