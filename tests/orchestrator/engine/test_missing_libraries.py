"""What a cluster is reached with is missing in this Python: new jobs fail at once, queued ones wait for another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orc.launchers.backends import open_backend
from orc.launchers.errors import BackendUnreachable
from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import get_cluster
from orc.orchestrator.client import Client

CLUSTERS = """\
lab: {kind: ssh, options: {hosts: [a.invalid]}}
hpc: {kind: slurm, root: /orc, options: {login: login.invalid}}
pod: {kind: tpu, options: {project: demo-project, zones: [us-central2-b], accelerator_type: v4-8}}
aws: {kind: sagemaker, options: {region: us-east-1, bucket: some-bucket, role: "arn:aws:iam::123456789012:role/r"}}
k8s: {kind: kubernetes, root: /orc, options: {image: some-image, volumes: [{claim: shared, path: /orc}]}}
"""
NEEDS = {"lab": "fabric", "hpc": "fabric", "pod": "google.cloud.tpu_v2", "aws": "boto3", "k8s": "kubernetes"}


@pytest.fixture(autouse=True)
def configured(orc_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text(CLUSTERS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: x\ncommand: 'true'\nlauncher: python\n")


@pytest.mark.parametrize("cluster", NEEDS)
def test_a_missing_library_is_said_before_anything_is_recorded(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job("job.yaml", cluster=cluster)
    monkeypatch.setitem(sys.modules, NEEDS[cluster], None)
    with Client(reconciler=False) as client:
        with pytest.raises(BackendUnreachable, match=r"fabric|Cloud TPU|boto3|Kubernetes") as caught:
            client.submit(job)
        assert client.jobs() == []
    assert caught.value.hint.removeprefix("Install it: ").startswith("pip install 'orc-launch[")


def test_a_tpu_needs_connections_to_its_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fabric", None)
    with pytest.raises(BackendUnreachable, match="fabric"):
        open_backend(get_cluster("pod")).check_installed()


@pytest.mark.parametrize("cluster", ["lab", "hpc"])
def test_a_queued_job_waits_for_a_pass_of_a_process_that_has_it(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from orc.orchestrator.engine.job_source import take
    from orc.orchestrator.engine.submission import enqueue, new_submission

    job = load_job("job.yaml", cluster=cluster)
    with Client(reconciler=False) as client:
        ws = client.workspace
        snapshot = take(ws.store, job, lambda *_: None, ws.backend(cluster))
        (queued,) = enqueue(ws, [new_submission(ws, job.spec, snapshot, source="")])
    monkeypatch.setitem(sys.modules, "fabric", None)
    with Client(reconciler=False) as client:
        client.refresh()
        view = client.job(queued.id)
    assert (view.state, "fabric, which is not installed here" in view.reason) == ("QUEUED", True)
