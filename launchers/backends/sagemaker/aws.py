"""SageMaker, S3, CloudWatch and Secrets Manager of one account and region, by boto3; the SDK names the stock images."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from orc.launchers.backends.sagemaker.failures import ambiguous, aws_errors, code_of, explain, message_of
from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.backends.sagemaker.names import split_uri
from orc.launchers.backends.sagemaker.settings import ClusterSettings
from orc.launchers.containers.objects import SIDE_BY_SIDE, ObjectStore
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable


def stock_image(image: Image, where: str) -> str:
    """Return the URI of a stock image, from the tables of the SDK that is installed. Raises `BackendError`."""
    framework, version, base = "pytorch", image.pytorch, None
    if image.transformers:
        framework, version = "huggingface", image.transformers
        base = f"pytorch{image.pytorch}" if image.pytorch else None
    try:
        return str(
            sdk_module("sagemaker.core.image_uris").retrieve(
                framework,
                image.region,
                version=version,
                base_framework_version=base,
                py_version=image.python,
                instance_type=image.instance_type,
                image_scope="training",
            )
        )
    except (ValueError, KeyError) as error:
        what = f"there is no stock image for that: {' '.join(str(error).split())}"
        hint = "Correct the versions, or give an image_uri."
        raise BackendError(what, where=where, hint=hint) from None


def sdk_module(name: str) -> Any:
    """Import a module of the SDK, or boto3. Raises `BackendUnreachable` when it is not installed.

    Another process may have it, so queued jobs wait.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BackendUnreachable(
            f"clusters of kind sagemaker need the package {error.name or 'sagemaker'}, version 3 of the SDK",
            hint="Install it: pip install 'orc-launch[aws]'",
        ) from None


LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_ATTEMPTS = 8  # botocore backs off between them, under throttling too
_ATTEMPTS_ELSEWHERE = 2  # in a region that botocore does not know: mostly there is none, and 8 would take 40 s
_GONE = ("404", "NoSuchKey", "NotFound", "NoSuchBucket")
_REFUSED = ("ValidationException", "ValidationError", "ResourceNotFound")


class NameTaken(BackendError):
    """There is a training job of that name already: ours of an earlier try, or another user's."""


class AwsService(ObjectStore):
    """The account and region of *place*. Nothing is contacted before it is needed; botocore finds credentials.

    All methods raise `BackendUnreachable` when there is no answer, `BackendError` otherwise. URIs of objects are
    ``s3://bucket/key``.
    """

    def __init__(self, place: ClusterSettings, region: str, where: str) -> None:
        self._place = place
        self._region = region
        self._where = where

    # -- sessions

    @cached_property
    def _session(self) -> Any:
        sdk_module("boto3")  # says what to install
        import boto3

        endpoint_url = self._place.endpoint_url

        class ClusterSession(boto3.Session):  # type: ignore[misc]
            """Session whose clients speak to the cluster's endpoint; the SDK's objects make theirs from it."""

            def client(self, *args: Any, **settings: Any) -> Any:
                return super().client(*args, **{"endpoint_url": endpoint_url, **settings})

        with self._errors(""):
            session = ClusterSession(profile_name=self._place.profile, region_name=self._region)
            if session.get_credentials() is None:
                from botocore.exceptions import NoCredentialsError

                raise NoCredentialsError
        return session

    def _client(self, name: str) -> Any:
        clients = self.__dict__.setdefault("_clients", {})
        if name not in clients:
            from botocore.config import Config

            session = self._session
            attempts = _ATTEMPTS_ELSEWHERE if self._regions() else _ATTEMPTS
            config = Config(
                retries={"mode": "standard", "total_max_attempts": attempts},
                connect_timeout=10,
                read_timeout=60,
                max_pool_connections=SIDE_BY_SIDE,
                user_agent_extra="orc-launch",
            )
            with self._errors(""):
                clients[name] = session.client(name, config=config)
        return clients[name]

    @contextmanager
    def _errors(self, asked: str, fine: Collection[str] = ()) -> Iterator[None]:
        """Translate the errors of a call; one whose code is in *fine* ends the context without a word."""
        try:
            yield
        except aws_errors() as error:
            if code_of(error) in fine:
                return
            if type(error).__name__ == "S3UploadFailedError":  # boto3's own, without the code
                error = error.__context__ or error  # type: ignore[assignment]
            raise explain(error, self._where, asked=asked, regions=self._regions()) from None

    def _regions(self) -> tuple[str, ...]:
        """Return the regions of SageMaker in botocore's tables, if ours is not among them."""
        session = self.__dict__.get("_session")
        if session is None or self._place.endpoint_url:
            return ()
        names = ("aws", "aws-cn", "aws-us-gov")
        known = [region for name in names for region in session.get_available_regions("sagemaker", name)]
        return () if self._region in known else tuple(known)

    def close(self) -> None:
        """Close the pools of connections."""
        for client in self.__dict__.pop("_clients", {}).values():
            client.close()

    # -- who we are

    def account(self) -> str:
        """The configured one is believed here; `identity` checks it."""
        return self._place.account or self.identity()

    def identity(self) -> str:
        """Return the account, from the security token service; one call."""
        if "_account" not in self.__dict__:
            with self._errors("sts:GetCallerIdentity"):
                self.__dict__["_account"] = str(self._client("sts").get_caller_identity()["Account"])
        return str(self.__dict__["_account"])

    def role_problem(self, arn: str) -> str:
        """Looks at the role and its trust policy, where we may."""
        from botocore.exceptions import BotoCoreError, ClientError

        name = arn.rpartition("/")[2]
        try:
            role = self._client("iam").get_role(RoleName=name)["Role"]
        except ClientError as error:
            return f"there is no role {name} in this account" if code_of(error) == "NoSuchEntity" else ""
        except BotoCoreError:
            return ""
        trust = role.get("AssumeRolePolicyDocument")
        if trust and "sagemaker.amazonaws.com" not in str(trust):
            return f"the trust policy of the role {name} does not allow sagemaker.amazonaws.com to assume it"
        return ""

    def image(self, image: Image) -> str:
        """From the tables of the SDK that is installed."""
        return stock_image(image, self._where)

    # -- objects

    def has_bucket(self, bucket: str) -> bool:
        """Return True for a bucket that exists. It must belong to the account: others may have taken its name."""
        owner = self.account()
        try:
            self._client("s3").head_bucket(Bucket=bucket, ExpectedBucketOwner=owner)
        except aws_errors() as error:
            if (code := code_of(error)) in _GONE:
                return False
            if code in ("301", "PermanentRedirect"):
                what, hint = (
                    f"the bucket {bucket} is not in {self._region}",
                    "Choose a `bucket` in the region of the jobs.",
                )
            elif code == "403":
                what = f"the bucket {bucket} is not this account's, or we may not look into it"
                hint = "Choose another `bucket`, or add s3:ListBucket, s3:GetObject and s3:PutObject for it."
            else:
                raise explain(error, self._where, asked="s3:HeadBucket") from None
            raise BackendError(what, where=self._where, hint=hint) from None
        return True

    def create_bucket(self, bucket: str) -> None:
        """Only us-east-1 is not named when buckets are made."""
        place = {} if self._region == "us-east-1" else {"LocationConstraint": self._region}
        extra = {"CreateBucketConfiguration": place} if place else {}
        with self._errors("s3:CreateBucket"):
            self._client("s3").create_bucket(Bucket=bucket, **extra)

    def put(self, uri: str, data: bytes | Path) -> None:
        """Write an object, encrypted with the KMS key, or else with S3's own."""
        bucket, key = split_uri(uri)
        encryption = {"ServerSideEncryption": "AES256"}
        if key_id := self._place.s3_kms_key:
            encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key_id}
        s3 = self._client("s3")
        with self._errors("s3:PutObject"):
            if isinstance(data, Path):
                s3.upload_file(str(data), bucket, key, ExtraArgs=encryption)
            else:
                s3.put_object(Bucket=bucket, Key=key, Body=data, **encryption)

    def get(self, uri: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """Return the content of an object from *offset* on, *limit* bytes at most; `None` when there is no object."""
        bucket, key = split_uri(uri)
        last = "" if limit is None else offset + limit - 1
        extra = {"Range": f"bytes={offset}-{last}"} if offset or limit is not None else {}
        try:
            return bytes(self._client("s3").get_object(Bucket=bucket, Key=key, **extra)["Body"].read())
        except aws_errors() as error:
            if (code := code_of(error)) in _GONE:
                return None
            if code in ("InvalidRange", "416"):
                return b""
            raise explain(error, self._where, asked="s3:GetObject") from None

    def exists(self, uri: str) -> bool:
        """Return True when the object exists: HeadObject."""
        bucket, key = split_uri(uri)
        with self._errors("s3:GetObject", _GONE):
            self._client("s3").head_object(Bucket=bucket, Key=key)
            return True
        return False

    def delete(self, uri: str) -> None:
        """S3 does not mind when there is none."""
        bucket, key = split_uri(uri)
        with self._errors("s3:DeleteObject"):
            self._client("s3").delete_object(Bucket=bucket, Key=key)

    # -- training jobs

    def create(self, request: Mapping[str, Any]) -> None:
        """Start the training job of *request*, which is sent as it is.

        Raises `NameTaken`, and `AmbiguousSubmit` when it is unknown whether it started.
        """
        name = str(request["TrainingJobName"])
        client = self._client("sagemaker")
        try:
            client.create_training_job(**request)
        except aws_errors() as error:
            if code_of(error) == "ResourceInUse":
                raise NameTaken(message_of(error), where=name) from None
            if ambiguous(error):
                raise AmbiguousSubmit(f"the answer was lost: {message_of(error)}", where=name) from None
            kind = str(request["ResourceConfig"].get("InstanceType", ""))
            raise explain(error, self._where, asked="sagemaker:CreateTrainingJob", instance_type=kind) from None

    def describe(self, name: str) -> dict[str, Any] | None:
        """Return the description of a training job; `None` when there is none."""
        try:
            return dict(self._client("sagemaker").describe_training_job(TrainingJobName=name))
        except aws_errors() as error:
            said = message_of(error).lower()
            if code_of(error) in _REFUSED and ("not found" in said or "could not find" in said):
                return None
            raise explain(error, self._where, asked="sagemaker:DescribeTrainingJob") from None

    def training_job(self, name: str) -> Any:
        """Return the SDK's object of a training job, with this session. Raises `BackendError` when there is none."""
        resources = sdk_module("sagemaker.core.resources")
        if self.describe(name) is None:
            raise BackendError(f"there is no training job {name} in {self._region}", where=self._where)
        with self._errors("sagemaker:DescribeTrainingJob"):
            return resources.TrainingJob.get(name, session=self._session, region=self._region)

    def summaries(self, *, since: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield jobs, newest first, created after *since* (seconds since the epoch), in pages of a hundred."""
        query: dict[str, Any] = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 100}
        if since is not None:
            query["CreationTimeAfter"] = datetime.fromtimestamp(since, UTC)
        with self._errors("sagemaker:ListTrainingJobs"):
            for page in self._client("sagemaker").get_paginator("list_training_jobs").paginate(**query):
                yield from page["TrainingJobSummaries"]

    def tags(self, arn: str) -> dict[str, str]:
        """Return all tags of a job: there are fifty at most."""
        with self._errors("sagemaker:ListTags"):
            found = self._client("sagemaker").list_tags(ResourceArn=arn)["Tags"]
        return {tag["Key"]: tag["Value"] for tag in found}

    def stop(self, name: str) -> None:
        """SageMaker refuses to stop what has ended; that is as good."""
        with self._errors("sagemaker:StopTrainingJob", _REFUSED):
            self._client("sagemaker").stop_training_job(TrainingJobName=name)

    # -- logs

    def streams(self, name: str) -> list[str]:
        """Return the log streams of a job, ``<job>/algo-<n>-<number>``, oldest first; none while it has not started."""
        query = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/"}
        found: list[tuple[int, str]] = []
        with self._errors("logs:DescribeLogStreams", ("ResourceNotFoundException",)):
            for page in self._client("logs").get_paginator("describe_log_streams").paginate(**query):
                found += [(int(s.get("creationTime") or 0), str(s["logStreamName"])) for s in page["logStreams"]]
        return [stream for _, stream in sorted(found)]

    def events(self, stream: str, token: str | None) -> tuple[list[str], str | None]:
        """Return the messages of a stream after *token*, and the token to go on with; none at its present end."""
        query: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamName": stream, "startFromHead": True}
        if token:
            query["nextToken"] = token
        page: dict[str, Any] = {"events": ()}
        with self._errors("logs:GetLogEvents", ("ResourceNotFoundException",)):
            page = self._client("logs").get_log_events(**query)
        return [str(event["message"]) for event in page["events"]], page.get("nextForwardToken") or token

    # -- secrets

    def put_secret(self, name: str, text: str, tags: Mapping[str, str]) -> None:
        """Create the secret in Secrets Manager, or replace its value."""
        client = self._client("secretsmanager")
        key = {"KmsKeyId": self._place.s3_kms_key} if self._place.s3_kms_key else {}
        pairs = [{"Key": each, "Value": value} for each, value in tags.items()]
        with self._errors("secretsmanager:CreateSecret", ("ResourceExistsException",)):
            client.create_secret(Name=name, SecretString=text, Tags=pairs, **key)
            return
        with self._errors("secretsmanager:PutSecretValue"):
            client.put_secret_value(SecretId=name, SecretString=text)

    def delete_secret(self, name: str) -> None:
        """Delete the secret at once, without the days of waiting."""
        with self._errors("secretsmanager:DeleteSecret", ("ResourceNotFoundException",)):
            self._client("secretsmanager").delete_secret(SecretId=name, ForceDeleteWithoutRecovery=True)
