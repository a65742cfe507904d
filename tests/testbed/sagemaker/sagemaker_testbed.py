"""Fixtures for SageMaker: `sagemaker` (the API server beside this file), `sagemaker_cluster` (a cluster that is it).

Needs root or user namespaces, for the containers. Without the packages of orc's extra ``aws`` and moto the tests that
ask for it are skipped, unless ``ORC_REQUIRE_TESTBEDS=1``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from orc.launchers.spec.clusters import Cluster

HERE = Path(__file__).resolve().parent
ACCOUNT, REGION, BUCKET, ROLE = "123456789012", "us-east-1", "orc-testbed", "orc-training"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": REGION}
_NEEDED = ("moto", "boto3", "sagemaker")


class SagemakerTestbed:
    """The running server."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory

    def client(self, service: str) -> Any:
        """A client of boto3 that talks to it."""
        import boto3

        session = boto3.Session("testing", "testing", region_name=REGION)
        return session.client(service, endpoint_url=self.url)

    def options(self, **more: Any) -> dict[str, Any]:
        """``options:`` of an orc cluster that is this one."""
        return {
            "region": REGION,
            "bucket": BUCKET,
            "account": ACCOUNT,
            "role": ROLE,
            "instance_type": "ml.c5.xlarge",
            "image_uri": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/train:1",
            "endpoint_url": self.url,
            "install_requirements": False,
            **more,
        }

    def interrupt(self, job: str) -> None:
        """Take a spot job's instances away."""
        (self.directory / "jobs" / job / "interrupt").touch()

    def interrupt_when(self, text: str) -> None:
        """Take the instances of the first spot job away that prints this."""
        order = self.directory / "interrupt-when"
        order.with_suffix(".new").write_text(text)
        order.with_suffix(".new").rename(order)  # what is empty would be in every line

    def hold(self, held: bool = True) -> None:
        """Keep new jobs from starting, or let them."""
        if held:
            (self.directory / "hold").touch()
        else:
            (self.directory / "hold").unlink(missing_ok=True)

    def keys(self, prefix: str = "") -> list[str]:
        """What is in the bucket."""
        pages = self.client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def machines(self) -> list[int]:
        """Processes that hold containers of this testbed."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if any(word.startswith(os.fsencode(self.directory)) for word in words):
                    found.append(int(entry.name))
        return found


def in_containers(job: Path, path: PurePosixPath) -> list[Path]:
    """Where *path* of a job's containers is on this machine: of the last ones, in the order of their numbers."""
    runs = sorted(job.glob("run-*"), key=lambda run: int(run.name.partition("-")[2]))
    hosts = sorted(runs[-1].glob("algo-*"), key=lambda host: int(host.name.partition("-")[2])) if runs else []
    return [host / "ml" / path.relative_to("/opt/ml") for host in hosts]


@pytest.fixture(scope="session")
def _sagemaker_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SagemakerTestbed]:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    from sagemaker_containers import unsupported_reason

    if why := unsupported_reason():
        pytest.skip(f"no containers: {why}")
    directory = tmp_path_factory.mktemp("sagemaker")
    errors = directory / "server.log"
    with errors.open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, str(HERE / "sagemaker_server.py"), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **CREDENTIALS},
        )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        url = server.stdout.readline().decode().strip()
        assert url, f"the server did not start:\n{errors.read_text()}"
        testbed = SagemakerTestbed(url, directory)
        testbed.client("s3").create_bucket(Bucket=BUCKET)
        statement = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        testbed.client("iam").create_role(RoleName=ROLE, AssumeRolePolicyDocument=policy)
        yield testbed
    finally:
        server.stdin.close()
        server.stdout.close()
        server.wait(60)
    deadline = time.monotonic() + 60
    while left := testbed.machines():
        assert time.monotonic() < deadline, f"containers that outlive the server: {left}"
        time.sleep(0.05)


@pytest.fixture
def sagemaker(_sagemaker_server: SagemakerTestbed, monkeypatch: pytest.MonkeyPatch) -> SagemakerTestbed:
    """The server, with credentials for it in the environment and no others."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    nowhere = str(_sagemaker_server.directory / "none")
    monkeypatch.setenv("AWS_CONFIG_FILE", nowhere)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", nowhere)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    _sagemaker_server.hold(False)
    (_sagemaker_server.directory / "interrupt-when").unlink(missing_ok=True)
    return _sagemaker_server


@pytest.fixture
def sagemaker_cluster(sagemaker: SagemakerTestbed) -> Cluster:
    """A cluster of kind sagemaker that is the testbed."""
    return Cluster(name="sagemaker", kind="sagemaker", options=sagemaker.options())
