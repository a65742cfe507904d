"""Training jobs that really run, in containers without docker, behind an API that has states."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sagemaker_testbed import BUCKET, SagemakerTestbed

from orc.launchers.backends import open_backend
from orc.launchers.backends.base import Cause, Phase, Snapshot
from orc.launchers.ids import AttemptId, new_job_id
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster
from orc.launchers.testing.jobs import Job

# Containers start slowly beside other tests: what limits these is what they wait for.
pytestmark = [pytest.mark.xdist_group("sagemaker"), pytest.mark.timeout(500)]

COUNTS = """
import json, os, pathlib, signal, sys, time
rank = os.environ["RANK"]
state = pathlib.Path(os.environ["ORC_CHECKPOINT_DIR"], f"state-{rank}.json")
count = json.loads(state.read_text())["count"] if state.exists() else 0
def save(*_):
    state.write_text(json.dumps({"count": count + 1}))
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print(f"begins at {count}, restart {os.environ['ORC_RESTART']}", flush=True)
while not count:
    time.sleep(0.05)
"""


@pytest.fixture
def start(sagemaker: SagemakerTestbed, orc_home: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``start(source, nodes=2, options={...}, **spec)``: submitted."""
    backends: list[Any] = []

    def start(
        source: str,
        /,
        nodes: int = 1,
        options: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> Job:
        cluster = Cluster(name="sagemaker", kind="sagemaker", options=sagemaker.options(**(options or {})))
        backend = open_backend(cluster)
        backends.append(backend)
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        store = ContentStore(orc_home / "state" / "store")
        snapshot = Snapshot(store.snapshot(tmp_path).bundle, store.ingest(runtime_bundle()))
        data = {"name": "executed", "script": "train.py", "launcher": "python", "resources": {"nodes": nodes}}
        data.update({"secrets": list(secrets or {}), **spec})
        plan = backend.render(JobSpec.model_validate(data), snapshot, AttemptId(new_job_id("executed"), 1))
        backend.stage(snapshot, plan)
        return Job(backend, plan, lambda plan, path: [], secrets or {}).submit()

    yield start
    for backend in backends:
        backend.close()


@pytest.fixture
def need_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun (Debian: openmpi-bin)")


def test_after_a_spot_interruption_the_ranks_go_on_from_what_is_in_s3(
    sagemaker: SagemakerTestbed, start: Callable[..., Job]
) -> None:
    run = start(COUNTS, nodes=2, options={"use_spot_instances": True, "max_wait": 86400})
    for rank in (0, 1):
        run.until_log(rank, "begins at 0")
    sagemaker.interrupt(run.handle.native_id)
    seen = run.wait(240)
    assert seen.phase is Phase.SUCCEEDED, run.log(node=0)
    assert seen.restarts == 1
    assert [run.log(rank) for rank in (0, 1)] == ["begins at 0, restart 0\nsaved\nbegins at 1, restart 1\n"] * 2
    assert seen.exit is not None
    assert seen.exit.complete
    assert sorted(seen.exit.ranks) == [0, 1]
    described = sagemaker.client("sagemaker").describe_training_job(TrainingJobName=run.handle.native_id)
    assert [each["Status"] for each in described["SecondaryStatusTransitions"]] == [
        *("Starting", "Downloading", "Training", "Interrupted"),
        *("Starting", "Downloading", "Training", "Uploading", "Completed"),
    ]


def test_the_failing_rank_is_in_sagemakers_own_failure_reason(
    sagemaker: SagemakerTestbed, start: Callable[..., Job]
) -> None:
    source = """
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError("the loss is not a number")
    time.sleep(600)
    """
    run = start(source, nodes=2)
    seen = run.wait(240)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert "rank 1 on algo-2 exited with 1" in seen.reason
    described = sagemaker.client("sagemaker").describe_training_job(TrainingJobName=run.handle.native_id)
    reason = described["FailureReason"]
    assert reason.startswith("AlgorithmError: rank 1 on algo-2 exited with 1\nTraceback"), reason
    assert "ValueError: the loss is not a number" in reason
    assert len(reason) < 1024 + 60


def test_mpirun_starts_ranks_on_all_hosts_without_any_ssh(need_mpirun: None, start: Callable[..., Job]) -> None:
    source = """
    import os, socket
    print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", socket.gethostname())
    """
    run = start(source, nodes=2, launcher="mpirun")
    assert run.wait(240).phase is Phase.SUCCEEDED, run.log(node=0)
    assert [run.log(rank) for rank in (0, 1)] == ["0 of 2 on algo-1\n", "1 of 2 on algo-2\n"]


def test_a_secret_is_in_no_object_once_the_job_has_ended(
    sagemaker: SagemakerTestbed, start: Callable[..., Job]
) -> None:
    run = start("import os; print(len(os.environ['TOKEN']))", secrets={"TOKEN": "sehr-geheim-4711"})
    assert run.wait(240).phase is Phase.SUCCEEDED, run.log(node=0)
    assert run.log(0) == "16\n"
    s3 = sagemaker.client("s3")
    for key in sagemaker.keys(f"orc/jobs/{AttemptId.from_marker(run.handle.marker).job}"):
        assert b"sehr-geheim-4711" not in s3.get_object(Bucket=BUCKET, Key=key)["Body"].read(), key


def test_the_variables_of_a_container_reach_the_ranks(start: Callable[..., Job]) -> None:
    source = """
    import json, os, pathlib
    names = ("SM_CURRENT_HOST", "SM_HOSTS", "SM_HP_LR", "SM_CHANNELS", "GLOO_SOCKET_IFNAME", "MINE")
    print(json.dumps({name: os.environ[name] for name in names}))
    pathlib.Path(os.environ["SM_MODEL_DIR"], "weights").write_text("w")
    """
    run = start(source, args={"lr": 0.1}, options={"environment": {"MINE": "set on the cluster"}})
    seen = run.wait(240)
    assert seen.phase is Phase.SUCCEEDED, run.log(node=0)
    assert json.loads(run.log(0)) == {
        "SM_CURRENT_HOST": "algo-1",
        "SM_HOSTS": '["algo-1"]',
        "SM_HP_LR": "0.1",
        "SM_CHANNELS": '["orc", "orc-attempt"]',
        "GLOO_SOCKET_IFNAME": "lo",
        "MINE": "set on the cluster",
    }
    assert "model.tar.gz" in seen.reason
