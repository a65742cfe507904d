"""The real SDK and boto3 against an API server that has states. Jobs are held back: nothing is executed here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from polling import until
from sagemaker_testbed import ACCOUNT, BUCKET, REGION, ROLE, SagemakerTestbed

from orc.launchers.backends.base import Cause, Handle, LogSelector, Phase, Snapshot
from orc.launchers.backends.sagemaker import SagemakerBackend, training_job
from orc.launchers.backends.sagemaker.rendering import request_of
from orc.launchers.errors import AmbiguousSubmit, BackendError, PartlyUnreachable
from orc.launchers.ids import AttemptId, new_job_id
from orc.launchers.plan import Plan
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

pytestmark = [pytest.mark.xdist_group("sagemaker")]


@pytest.fixture(autouse=True)
def held(sagemaker: SagemakerTestbed) -> Iterator[None]:
    """No job starts."""
    sagemaker.hold()
    yield
    stop_all(sagemaker)
    sagemaker.hold(False)


def stop_all(sagemaker: SagemakerTestbed) -> None:
    client = sagemaker.client("sagemaker")
    for row in client.list_training_jobs(StatusEquals="InProgress", MaxResults=100)["TrainingJobSummaries"]:
        client.stop_training_job(TrainingJobName=row["TrainingJobName"])


@pytest.fixture
def backend(sagemaker: SagemakerTestbed, tmp_path: Path) -> Iterator[Callable[..., SagemakerBackend]]:
    made: list[SagemakerBackend] = []

    def make(**options: Any) -> SagemakerBackend:
        given = {key: value for key, value in sagemaker.options(**options).items() if value is not None}
        made.append(SagemakerBackend(Cluster(name="sm", kind="sagemaker", options=given), state_dir=tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    workdir = tmp_path / "work"
    workdir.mkdir()
    (workdir / "train.py").write_text("print('hello')\n")
    (workdir / "run.sh").write_text("#!/bin/sh\n")
    (workdir / "run.sh").chmod(0o755)
    (workdir / "link.py").symlink_to("train.py")
    store, runtime = ContentStore(tmp_path / "store"), runtime_bundle()
    store.ingest(runtime)
    return Snapshot(store.snapshot(workdir).bundle, runtime.bundle)


def render(backend: SagemakerBackend, snapshot: Snapshot, own: dict[str, Any] | None = None, **spec: Any) -> Plan:
    resources = {**spec.pop("resources", {}), "options": {"sagemaker": own or {}}}
    job = JobSpec.model_validate({"name": "digits", "script": "train.py", "resources": resources, **spec})
    return backend.render(job, snapshot, AttemptId(new_job_id("digits"), 1))


def submit(backend: SagemakerBackend, snapshot: Snapshot, own: dict[str, Any] | None = None, **spec: Any) -> Handle:
    plan = render(backend, snapshot, own, **spec)
    backend.stage(snapshot, plan)
    return backend.submit(plan, dict.fromkeys(plan.secrets, "hidden value"))


def ended(backend: SagemakerBackend, handle: Handle) -> Any:
    return until(lambda: (seen := backend.poll([handle])[handle]).phase.ended and seen, 120)


def test_exactly_the_rendered_request_is_sent(sagemaker, backend, snapshot) -> None:
    own = {
        "use_spot_instances": True,
        "max_run": 600,
        "max_wait": 1200,
        "environment": {"A": "1"},
        "max_retry_attempts": 3,
        "tags": {"team": "vision"},
        "metric_definitions": {"loss": "loss=([0-9.]+)"},
        "volume_kms_key": "alias/x",
        "subnets": ["subnet-1"],
        "security_group_ids": ["sg-1"],
    }
    here = backend()
    plan = render(here, snapshot, own, args={"epochs": 3}, resources={"nodes": 2})
    here.stage(snapshot, plan)
    handle = here.submit(plan, {})
    wanted = request_of(plan)
    client = sagemaker.client("sagemaker")
    found = client.describe_training_job(TrainingJobName=handle.native_id)
    tags = {tag["Key"]: tag["Value"] for tag in client.list_tags(ResourceArn=found["TrainingJobArn"])["Tags"]}
    assert tags == {tag["Key"]: tag["Value"] for tag in wanted.pop("Tags")}
    for key, value in wanted.items():
        got = found[key]
        if isinstance(value, dict):
            got = {name: each for name, each in got.items() if name in value or each}
        assert got == value, key


def test_no_defaults_of_configuration_files_get_into_a_request(
    sagemaker, backend, snapshot, tmp_path, monkeypatch
) -> None:
    defaults = tmp_path / "config.yaml"
    defaults.write_text(
        "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: false\n"
        "  TrainingJob:\n    VpcConfig:\n      Subnets: ['subnet-9']\n      SecurityGroupIds: ['sg-9']\n"
    )
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(defaults))
    handle = submit(backend(), snapshot)
    found = sagemaker.client("sagemaker").describe_training_job(TrainingJobName=handle.native_id)
    assert "VpcConfig" not in found
    assert os.environ["SAGEMAKER_USER_CONFIG_OVERRIDE"] == str(defaults)


def test_an_unchanged_snapshot_is_uploaded_once_and_holds_no_local_path(sagemaker, backend, snapshot, tmp_path) -> None:
    import io
    import tarfile

    here = backend(prefix="once")
    submit(here, snapshot)
    s3 = sagemaker.client("s3")
    (key,) = [key for key in sagemaker.keys("once/snapshots/") if key.endswith("source.tar.gz")]
    before = s3.head_object(Bucket=BUCKET, Key=key)
    submit(backend(prefix="once"), snapshot)
    assert s3.head_object(Bucket=BUCKET, Key=key)["LastModified"] == before["LastModified"]
    assert before["ServerSideEncryption"] == "AES256"
    data = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = {member.name: member for member in archive.getmembers()}
        content = b"".join(archive.extractfile(each).read() for each in members.values() if each.isfile())  # type: ignore[union-attr]
    assert {"code/train.py", "code/link.py", "runtime/__main__.py", "runtime/lib/orc/launchers/agent/node.py"} <= set(
        members
    )
    assert members["code/run.sh"].mode == 0o755
    assert members["code/link.py"].linkname == "train.py"
    assert all((m.uid, m.mtime, m.uname) == (0, 0, "") for m in members.values())
    assert str(tmp_path).encode() not in data
    assert str(tmp_path).encode() not in content


def test_the_same_attempt_submitted_again_is_the_same_job(backend, snapshot) -> None:
    here = backend()
    plan = render(here, snapshot, {"base_job_name": "demo"}, resources={"nodes": 2})
    here.stage(snapshot, plan)
    assert here.find(plan.marker) is None
    first = here.submit(plan, {})
    token = here.aws.get(plan.files[0].path.replace("agent.json", "link.json"))
    second, third = here.submit(plan, {}), backend().find(plan.marker)
    assert {handle.native_id for handle in (first, second, third)} == {first.native_id}
    assert first.native_id.startswith("demo-")
    assert here.aws.get(plan.files[0].path.replace("agent.json", "link.json")) == token


def test_a_name_that_is_somebody_elses_is_refused_and_nothing_secret_is_left(sagemaker, backend, snapshot) -> None:
    here = backend()
    plan = render(here, snapshot, secrets=["TOKEN"], resources={"nodes": 2})
    here.stage(snapshot, plan)
    theirs = {**request_of(plan), "Environment": {}, "Tags": []}
    theirs["InputDataConfig"] = theirs["InputDataConfig"][:1]
    sagemaker.client("sagemaker").create_training_job(**theirs)
    with pytest.raises(BackendError, match="not this attempt's"):
        here.submit(plan, {"TOKEN": "hidden value"})
    assert kept(sagemaker, plan.marker) == []
    assert here.find(plan.marker) is None


@pytest.mark.parametrize("how", ["s3", "secretsmanager"])
def test_secrets_are_nowhere_in_the_request_and_gone_when_the_attempt_has_ended(
    sagemaker, backend, snapshot, how
) -> None:
    here = backend(secrets=how)
    handle = submit(here, snapshot, secrets=["TOKEN"], resources={"nodes": 2})
    found = sagemaker.client("sagemaker").describe_training_job(TrainingJobName=handle.native_id)
    assert "hidden value" not in json.dumps(found, default=str)
    assert len(kept(sagemaker, handle.marker)) == 2
    here.cancel([handle], timedelta(seconds=5))
    seen = ended(here, handle)
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert kept(sagemaker, handle.marker) == []


@pytest.mark.parametrize("how", ["s3", "secretsmanager"])
def test_nothing_secret_is_left_of_a_submission_that_was_cut_off_and_is_cancelled(
    sagemaker, backend, snapshot, monkeypatch, how
) -> None:
    here = backend(secrets=how)
    plan = render(here, snapshot, secrets=["TOKEN"], resources={"nodes": 2})

    def cut_off(_: Any) -> None:
        raise AmbiguousSubmit("the connection was reset")

    monkeypatch.setattr(here.aws, "create", cut_off)
    with pytest.raises(AmbiguousSubmit):
        here.submit(plan, {"TOKEN": "hidden value"})
    assert here.find(plan.marker) is None  # it may come yet, and needs them
    assert len(kept(sagemaker, plan.marker)) == 2
    assert backend(secrets=how).find(plan.marker, complete=False) is None
    assert kept(sagemaker, plan.marker) == []


def test_nothing_secret_is_left_of_an_attempt_that_sagemaker_has_forgotten(sagemaker, backend, snapshot) -> None:
    here = backend()
    plan = render(here, snapshot, secrets=["TOKEN"], resources={"nodes": 2})
    here._upload(plan, {"TOKEN": "hidden value"})
    lost = Handle("sm", "sagemaker", plan.marker, plan.marker, time.time() - 3600)
    assert here.poll([lost])[lost].phase is Phase.LOST
    here.reap(lost)
    assert kept(sagemaker, plan.marker) == []


def kept(sagemaker: SagemakerTestbed, marker: str) -> list[str]:
    """Where the attempt's secrets are, and what its agents know each other by."""
    job = AttemptId.from_marker(marker).job
    secrets = sagemaker.client("secretsmanager").list_secrets()["SecretList"]
    objects = [key for key in sagemaker.keys(f"orc/jobs/{job}/") if key.endswith(("secrets.json", "link.json"))]
    s3 = sagemaker.client("s3")
    assert all(s3.head_object(Bucket=BUCKET, Key=key)["ServerSideEncryption"] for key in objects)
    return [*objects, *(secret["Name"] for secret in secrets if marker in secret["Name"])]


def test_a_job_that_waits_is_pending_has_no_logs_and_can_be_stopped_twice(backend, snapshot) -> None:
    here = backend()
    handle = submit(here, snapshot)
    seen = here.poll([handle])[handle]
    assert seen.phase is Phase.PENDING
    assert seen.reason
    assert here.log_selectors(handle) == []
    assert list(here.logs(handle, LogSelector(rank=0))) == []
    assert here.read_file(handle, "metrics.jsonl") == b""
    here.cancel([handle], timedelta(seconds=5))
    ended(here, handle)
    here.cancel([handle], timedelta(seconds=5))


def test_a_job_that_may_not_be_stopped_is_named_and_the_others_are_stopped(backend, snapshot, monkeypatch) -> None:
    here = backend()
    first, second = (submit(here, snapshot) for _ in range(2))
    service = here.aws
    stop = service.stop

    def refuse(name: str) -> None:
        if name == first.native_id:
            raise BackendError("not allowed: sagemaker:StopTrainingJob")
        stop(name)

    monkeypatch.setattr(service, "stop", refuse)
    with pytest.raises(PartlyUnreachable, match="StopTrainingJob") as caught:
        here.cancel([first, second], timedelta(seconds=5))
    assert caught.value.markers == (first.marker,)
    assert ended(here, second).phase is Phase.CANCELLED
    assert here.poll([first])[first].phase is Phase.PENDING


def test_a_refused_submission_says_why_and_that_its_secrets_are_left(backend, snapshot, monkeypatch) -> None:
    here = backend()
    service = here.aws

    def refuse(what: str) -> Callable[..., None]:
        def raise_it(*_: Any, **__: Any) -> None:
            raise BackendError(what)

        return raise_it

    monkeypatch.setattr(service, "create", refuse("the quota is used up"))
    monkeypatch.setattr(service, "delete", refuse("not allowed: s3:DeleteObject"))
    with pytest.raises(BackendError, match="the quota is used up") as caught:
        submit(here, snapshot, secrets=["TOKEN"])
    assert "secrets may still be at AWS, and could not be removed: not allowed: s3:DeleteObject" in caught.value.hint


def test_many_jobs_are_looked_up_in_lists_and_described_only_when_they_have_ended(
    sagemaker, backend, snapshot, monkeypatch
) -> None:
    here = backend()
    plan = render(here, snapshot)
    here.stage(snapshot, plan)
    client = sagemaker.client("sagemaker")
    handles = []
    for number in range(1, 13):
        attempt = AttemptId(plan.attempt.job, number)
        request = {**request_of(plan), "TrainingJobName": attempt.marker}
        client.create_training_job(**request)
        handles.append(Handle("sm", "sagemaker", attempt.marker, attempt.marker, time.time()))
    gone = Handle("sm", "sagemaker", "orc-gone-abcdef-a1", "orc-gone-abcdef-a1", time.time() - 3600)
    service = here.aws
    described: list[str] = []
    describe = service.describe
    monkeypatch.setattr(service, "describe", lambda name: described.append(name) or describe(name))
    seen = here.poll([*handles, gone])
    assert {seen[handle].phase for handle in handles} == {Phase.PENDING}
    assert seen[gone].phase is Phase.LOST
    assert described == [gone.native_id]
    here.cancel(handles[:1], timedelta(0))
    ended(here, handles[0])
    described.clear()
    assert here.poll(handles)[handles[0]].phase is Phase.CANCELLED
    assert described == [handles[0].native_id]


def test_preflight_finds_nothing_to_complain_about_and_changes_nothing(sagemaker, backend, snapshot) -> None:
    here = backend(account=None)
    before = sagemaker.keys()
    assert here.preflight(render(here, snapshot)) == []
    assert sagemaker.keys() == before


COMPLAINTS = {
    "role": ({"role": "nobody"}, "there is no role nobody"),
    "bucket": ({"bucket": "not-there"}, "there is no bucket not-there"),
    "account": ({"account": "210987654321"}, f"the credentials are of the account {ACCOUNT}"),
    "image": ({"image_uri": None, "pytorch_version": "2.99"}, "no stock image"),
    "old Python": ({"image_uri": None, "pytorch_version": "1.10.2"}, "Python 3.8"),
}


@pytest.mark.parametrize("why", COMPLAINTS)
def test_preflight_says_what_stands_in_the_way(why, backend, snapshot) -> None:
    options, what = COMPLAINTS[why]
    here = backend(**options)
    (finding,) = here.preflight(render(here, snapshot))
    assert what in finding.what
    assert finding.hint


def test_what_only_aws_knows_is_filled_in_at_submission(sagemaker, backend, snapshot) -> None:
    here = backend(account=None, bucket=None, image_uri=None, pytorch_version="2.5", region=REGION)
    (finding,) = here.preflight(render(here, snapshot))
    assert (finding.level, finding.what) == ("info", f"the bucket sagemaker-{REGION}-{ACCOUNT} will be made")
    handle = submit(here, snapshot)
    found = sagemaker.client("sagemaker").describe_training_job(TrainingJobName=handle.native_id)
    assert found["RoleArn"] == f"arn:aws:iam::{ACCOUNT}:role/{ROLE}"
    assert found["OutputDataConfig"]["S3OutputPath"].startswith(f"s3://sagemaker-{REGION}-{ACCOUNT}/orc/jobs/")
    assert here.find(handle.marker) is not None


def test_a_training_job_is_handed_back_as_an_object_of_the_sdk(sagemaker, backend, snapshot) -> None:
    here = backend()
    handle = submit(here, snapshot)
    job = training_job(here.cluster, handle.native_id)
    assert type(job).__module__ == "sagemaker.core.resources"
    assert (job.training_job_name, job.training_job_status) == (handle.native_id, "InProgress")
    job.stop()
    assert ended(here, handle).phase is Phase.CANCELLED
    job.refresh()
    assert job.training_job_status == "Stopped"
    with pytest.raises(BackendError, match="there is no training job nothing in "):
        training_job(here.cluster, "nothing")


def test_a_role_that_sagemaker_may_not_assume_is_named(sagemaker, backend, snapshot) -> None:
    iam = sagemaker.client("iam")
    statement = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    name = f"role-{new_job_id('x')}"
    iam.create_role(
        RoleName=name, AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    )
    here = backend(role=name)
    (finding,) = here.preflight(render(here, snapshot))
    assert "does not allow sagemaker.amazonaws.com" in finding.what
