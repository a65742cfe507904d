"""What AWS may say, and the one message that people get for it. AWS is a server here that says what it is told to."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from orc.launchers.backends.sagemaker.aws import AwsService, NameTaken
from orc.launchers.backends.sagemaker.settings import ClusterSettings
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable, LaunchError

pytest.importorskip("sagemaker")

REQUEST = {
    "TrainingJobName": "orc-digits-k3f9a2-a1",
    "AlgorithmSpecification": {"TrainingImage": "x:1", "TrainingInputMode": "File", "ContainerEntrypoint": ["python3"]},
    "RoleArn": "arn:aws:iam::123456789012:role/training",
    "OutputDataConfig": {"S3OutputPath": "s3://my-bucket/out"},
    "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
}
Answer = tuple[int, str, str]  # status, code, message; an empty code is a success with that JSON


class Aws:
    """Answers in turn; the last one for ever. ``None`` breaks the connection without an answer."""

    def __init__(self) -> None:
        self.answers: list[Answer | None] = []
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    def next(self) -> Answer | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Aws, str]]:
    said = Aws()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            said.asked.append(self.headers.get("X-Amz-Target", "").rpartition(".")[2])
            said.bodies.append(json.loads(body) if body[:1] == b"{" else {})
            answer = said.next()
            if answer is None:
                self.connection.close()
                return
            status, code, message = answer
            text = (json.dumps({"__type": code, "message": message}) if code else message).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    for name, value in {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("time.sleep", lambda _: None)  # botocore waits between its attempts
    yield said, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def service(aws: tuple[Aws, str]) -> Iterator[AwsService]:
    made = AwsService(ClusterSettings(endpoint_url=aws[1]), "us-east-1", "cluster sm")
    yield made
    made.close()


def create(service: AwsService) -> None:
    service.create(REQUEST)


DENIED = "User: x is not authorized to perform: sagemaker:CreateTrainingJob"
LIMIT = "The account-level service limit is 0 Instances"
ROLE = "Could not assume role arn:x. Please ensure that the role exists"
TYPE = "Value 'ml.x9' at 'resourceConfig.instanceType' failed to satisfy constraint"
# What AWS answers, the error, what it says, and what to do.
MESSAGES: dict[tuple[str, str], tuple[type[LaunchError], str, str]] = {
    ("ExpiredTokenException", "expired"): (BackendUnreachable, "have expired", "aws sso login"),
    ("UnrecognizedClientException", "x"): (BackendUnreachable, "does not accept", "credentials"),
    ("AccessDeniedException", DENIED): (
        BackendError,
        f"not allowed: sagemaker:CreateTrainingJob: {DENIED}",
        "permission",
    ),
    ("ResourceLimitExceeded", LIMIT): (
        BackendError,
        f"quota for ml.p4d.24xlarge is used up: {LIMIT}",
        "Service Quotas",
    ),
    ("ValidationException", ROLE): (BackendError, "refuses the request: Could not assume role", "trust policy"),
    ("ValidationException", TYPE): (BackendError, "instanceType", "instance_type"),
    ("ResourceInUse", "Training job names must be unique"): (NameTaken, "must be unique", ""),
    ("ThrottlingException", "Rate exceeded"): (BackendUnreachable, "asked too often", ""),
    ("InternalFailure", "oops"): (AmbiguousSubmit, "the answer was lost: oops", ""),
}


@pytest.mark.parametrize(("code", "message"), MESSAGES)
def test_each_refusal_of_a_new_job_has_one_clear_message(code, message, aws, service) -> None:
    kind, what, hint = MESSAGES[code, message]
    aws[0].answers = [(500 if code == "InternalFailure" else 400, code, message)]
    with pytest.raises(kind) as caught:
        create(service)
    assert type(caught.value) is kind
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.where
    assert "\n" not in caught.value.what


def test_a_connection_that_breaks_after_the_request_leaves_doubt(aws, service) -> None:
    aws[0].answers = [None]
    with pytest.raises(AmbiguousSubmit):
        create(service)


def test_throttling_is_waited_out(aws, service) -> None:
    slow = (400, "ThrottlingException", "Rate exceeded")
    aws[0].answers = [slow, slow, (200, "", json.dumps({"TrainingJobSummaries": []}))]
    assert list(service.summaries()) == []
    assert len(aws[0].asked) == 3


def test_pages_are_fetched_as_they_are_used(aws, service) -> None:
    def page(name: str, **more: str) -> Answer:
        row = {"TrainingJobName": name, "TrainingJobArn": "arn:x", "CreationTime": 0, "TrainingJobStatus": "Completed"}
        return 200, "", json.dumps({"TrainingJobSummaries": [row], **more})

    aws[0].answers = [page("a", NextToken="2"), page("b", NextToken="3"), page("c")]
    rows = service.summaries(since=100.0)
    assert next(rows)["TrainingJobName"] == "a"
    assert len(aws[0].asked) == 1
    assert [row["TrainingJobName"] for row in rows] == ["b", "c"]
    assert [body.get("NextToken") for body in aws[0].bodies] == [None, "2", "3"]
    assert aws[0].bodies[0]["CreationTimeAfter"] == 100


CALLS: dict[str, Callable[[AwsService], Any]] = {
    "describe": lambda service: service.describe("x"),
    "list": lambda service: list(service.summaries()),
    "stop": lambda service: service.stop("x"),
    "tags": lambda service: service.tags("arn:x"),
    "streams": lambda service: service.streams("x"),
    "events": lambda service: service.events("x/algo-1-1", None),
    "secret": lambda service: service.put_secret("orc/x", "text", tags={}),
    "forget": lambda service: service.delete_secret("orc/x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_credentials_that_expire_never_look_like_a_failed_job(call, aws, service) -> None:
    aws[0].answers = [(400, "ExpiredTokenException", "The security token included in the request is expired")]
    with pytest.raises(BackendUnreachable, match="have expired"):
        CALLS[call](service)


def test_what_is_not_there_is_no_error(aws, service) -> None:
    aws[0].answers = [(400, "ValidationException", "Requested resource not found.")]
    assert service.describe("x") is None
    service.stop("x")
    aws[0].answers = [(400, "ResourceNotFoundException", "The specified log group does not exist.")]
    assert service.streams("x") == []
    assert service.events("x/algo-1-1", "token") == ([], "token")
    service.delete_secret("orc/x")


def test_no_credentials_at_all(monkeypatch, tmp_path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(BackendUnreachable, match="there are no AWS credentials") as caught:
        AwsService(ClusterSettings(), "us-east-1", "cluster sm").identity()
    assert caught.value.where == "cluster sm"
    assert "aws sso login" in caught.value.hint
    with pytest.raises(BackendError, match="mine"):
        AwsService(ClusterSettings(profile="mine"), "us-east-1", "cluster sm").identity()


def test_an_unknown_region_is_named_with_those_that_are_known(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    service = AwsService(ClusterSettings(), "us-east-9", "cluster sm")
    client = service._client("sts")
    client.meta.events.register_first("before-send.sts", _nobody)
    with pytest.raises(BackendUnreachable, match="nobody answers") as caught:
        service.identity()
    assert "us-east-9" in caught.value.what
    assert "us-east-1" in caught.value.hint


def _nobody(request: Any, **_: Any) -> None:
    from botocore.exceptions import EndpointConnectionError

    raise EndpointConnectionError(endpoint_url=request.url)


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(BackendError, match="need the package boto3") as missing:
        AwsService(ClusterSettings(), "us-east-1", "cluster sm").identity()
    assert "pip install 'orc-launch[aws]'" in missing.value.hint
