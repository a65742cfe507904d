"""AWS's API on this machine for tests: moto's server, with a SageMaker that has states and really runs its jobs.

``python sagemaker_server.py DIRECTORY`` prints its URL and serves until its standard input ends. A job's directory is
``DIRECTORY/jobs/<name>``; the files ``stop`` and ``interrupt`` there are orders, ``hold`` in DIRECTORY keeps new jobs
from starting, and the first job that prints what ``interrupt-when`` holds is interrupted at once. Only training jobs
differ from moto: their requests are checked against the constraints of the API's own model, their states follow what
their containers do, their output is in CloudWatch, their files are in S3.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.logs.models import logs_backends
from moto.s3.models import s3_backends
from moto.sagemaker import models, responses
from moto.sagemaker.exceptions import ResourceInUseException, ValidationError
from moto.server import ThreadedMotoServer
from sagemaker_training import TERMINAL, PlatformSettings, Training

from orc.launchers.backends.sagemaker.rendering import violations

ACCOUNT, REGION = "123456789012", "us-east-1"
GROUP = "/aws/sagemaker/TrainingJobs"
GRACE_S = 30.0
SYNC_S = 0.3
_MAKING = threading.Lock()  # jobs begin to speak at the same time


class S3:
    """`Storage` in moto's own memory: what a request over HTTP would find there."""

    def __init__(self) -> None:
        self.backend = s3_backends[ACCOUNT]["aws"]

    def fetch(self, uri: str, directory: Path) -> None:
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        keys = self.backend.get_bucket(bucket).keys
        for key in [name for name in list(keys) if name.startswith(prefix)]:
            name = key[len(prefix) :].lstrip("/") or key.rpartition("/")[2]
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(keys[key].value)

    def put(self, uri: str, path: Path) -> None:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        self.backend.put_object(bucket, key, path.read_bytes())


class Job:
    """One training job: its request and what has become of it."""

    def __init__(self, request: dict[str, Any], arn: str, directory: Path) -> None:
        self.request = request
        self.arn = arn
        self.created = datetime.now(UTC)
        self.state: dict[str, Any] = {
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": "Starting",
            "SecondaryStatusTransitions": [],
        }
        self.directory = directory
        self.thread = threading.Thread(target=self.run, daemon=True, name=arn)

    def run(self) -> None:
        while (self.directory.parent.parent / "hold").exists() and not (self.directory / "stop").exists():
            time.sleep(0.02)
        platform = PlatformSettings(
            grace_s=GRACE_S,
            sync_s=SYNC_S,
            keep=True,
            path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            env={"AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION},
        )
        Training(
            {**self.request, "TrainingJobArn": self.arn},
            self.directory,
            S3(),
            platform,
            on_change=self.note,
            on_output=self.write,
        ).run()

    def write(self, stream: str, lines: list[str]) -> None:
        write_logs(stream, lines)
        order = self.directory.parent.parent / "interrupt-when"
        try:
            text = order.read_text()
        except FileNotFoundError:
            return
        if any(text in line for line in lines):
            order.unlink(missing_ok=True)  # another job may have printed it, too
            (self.directory / "interrupt").touch()

    def note(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)

    def describe(self) -> dict[str, Any]:
        found = {key: value for key, value in self.request.items() if key != "Tags"}
        return {
            **found,
            "TrainingJobArn": self.arn,
            "CreationTime": self.created,
            "LastModifiedTime": self.created,
            **dated(self.state),
        }


def dated(value: Any) -> Any:
    """Seconds since the epoch as times."""
    if isinstance(value, list):
        return [dated(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: datetime.fromtimestamp(item, UTC) if isinstance(item, float) and key.endswith("Time") else dated(item)
        for key, item in value.items()
    }


def write_logs(stream: str, lines: list[str]) -> None:
    """One event for each line, as the log driver does it; an event is never empty."""
    backend = logs_backends[ACCOUNT][REGION]
    with _MAKING:
        if GROUP not in backend.groups:
            backend.create_log_group(GROUP, {})
        if stream not in backend.groups[GROUP].streams:
            backend.create_log_stream(GROUP, stream)
    now = int(time.time() * 1000)
    backend.put_log_events(GROUP, stream, [{"timestamp": now, "message": line or " "} for line in lines])


# --- the API ---------------------------------------------------------------------------------------------------------


class Api:
    """The operations on training jobs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs: dict[str, Job] = {}
        self.lock = threading.Lock()

    def create(self, response: responses.SageMakerResponse) -> ActionResult:
        request = json.loads(response.body)
        name = request["TrainingJobName"]
        bad = [f"{member}: {why}" for member, why in violations(request)]
        if bad:
            raise ValidationError(f"{len(bad)} validation error detected: {'; '.join(bad)}")
        stopping = request.get("StoppingCondition") or {}
        if request.get("EnableManagedSpotTraining") and stopping.get("MaxWaitTimeInSeconds", 0) < stopping.get(
            "MaxRuntimeInSeconds", 86400
        ):
            raise ValidationError(
                "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds"
            )
        if "MaxWaitTimeInSeconds" in stopping and not request.get("EnableManagedSpotTraining"):
            raise ValidationError("MaxWaitTimeInSeconds can only be set when EnableManagedSpotTraining is true")
        with self.lock:
            arn = models.FakeTrainingJob.arn_formatter(name, ACCOUNT, REGION)
            if name in self.jobs:
                raise ResourceInUseException(
                    "Training job names must be unique within an AWS account and region, and a training job with "
                    f"this name already exists ({arn})"
                )
            directory = self.directory / "jobs" / name
            directory.mkdir(parents=True)
            job = self.jobs[name] = Job(request, arn, directory)
        job.thread.start()
        return ActionResult({"TrainingJobArn": arn})

    def find(self, response: responses.SageMakerResponse) -> Job:
        job = self.jobs.get(json.loads(response.body)["TrainingJobName"])
        if job is None:
            raise ValidationError("Requested resource not found.")
        return job

    def describe(self, response: responses.SageMakerResponse) -> ActionResult:
        return ActionResult(self.find(response).describe())

    def stop(self, response: responses.SageMakerResponse) -> EmptyResult:
        job = self.find(response)
        if job.state["TrainingJobStatus"] in TERMINAL:
            status = job.state["TrainingJobStatus"]
            raise ValidationError(f"The request was rejected because the training job is in status {status}.")
        (job.directory / "stop").touch()
        return EmptyResult()

    def list(self, response: responses.SageMakerResponse) -> ActionResult:
        asked = json.loads(response.body)
        found = sorted(self.jobs.values(), key=lambda job: job.created, reverse=asked.get("SortOrder") != "Ascending")
        if after := asked.get("CreationTimeAfter"):
            found = [job for job in found if job.created.timestamp() > float(after)]
        if text := asked.get("NameContains"):
            found = [job for job in found if text in job.request["TrainingJobName"]]
        if status := asked.get("StatusEquals"):
            found = [job for job in found if job.state["TrainingJobStatus"] == status]
        start, size = int(asked.get("NextToken") or 0), int(asked.get("MaxResults") or 10)
        names = ("TrainingJobName", "TrainingJobArn", "CreationTime", "TrainingEndTime", "LastModifiedTime")
        names += ("TrainingJobStatus", "SecondaryStatus")
        shown = [job.describe() for job in found[start : start + size]]
        page: dict[str, Any] = {
            "TrainingJobSummaries": [{name: job[name] for name in names if name in job} for job in shown]
        }
        if start + size < len(found):
            page["NextToken"] = str(start + size)
        return ActionResult(page)

    def tags(self, response: responses.SageMakerResponse) -> ActionResult:
        arn = json.loads(response.body)["ResourceArn"]
        job = next((job for job in self.jobs.values() if job.arn == arn), None)
        return _moto_tags(response) if job is None else ActionResult({"Tags": job.request.get("Tags") or []})


_moto_tags = responses.SageMakerResponse.list_tags


def install(api: Api) -> None:
    """Put the operations into moto's SageMaker."""
    kind = responses.SageMakerResponse
    kind.create_training_job = lambda self: api.create(self)
    kind.describe_training_job = lambda self: api.describe(self)
    kind.stop_training_job = lambda self: api.stop(self)
    kind.list_training_jobs = lambda self: api.list(self)
    kind.list_tags = lambda self: api.tags(self)


def main(directory: Path) -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    api = Api(directory)
    install(api)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    sys.stdin.read()
    # The containers live as long as this process holds their machines' standard input: they end with it.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
