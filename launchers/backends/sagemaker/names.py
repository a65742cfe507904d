"""Names of what an attempt has at AWS: its training job and its objects in S3. Pure."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from orc.launchers.ids import AttemptId

MAX_NAME = 63
# What stands for the number of the AWS account until a submission has asked for it.
ACCOUNT = "<account>"


def training_job_name(attempt: AttemptId, base: str | None = None) -> str:
    """The attempt's marker, or *base* and the end of the marker; letters, digits and dashes, 63 at most.

    The name follows from its arguments, so a second submission of the same attempt meets the first at AWS.
    """
    if base is None:
        return _cut(attempt.marker, attempt)
    end = name_end(attempt)
    return f"{base[: MAX_NAME - len(end) - 1].rstrip('-')}-{end}"


def name_end(attempt: AttemptId) -> str:
    """Return the end of an attempt's training job name, which does not depend on its beginning."""
    tail = attempt.job.rpartition("-")[2]
    if not re.fullmatch("[a-z0-9]{6,10}", tail):
        tail = _short(attempt.job)
    return f"{tail}-a{attempt.number}"


def _cut(marker: str, attempt: AttemptId) -> str:
    if len(marker) <= MAX_NAME:
        return marker
    end = f"-{_short(attempt.job)}-a{attempt.number}"
    return marker[: MAX_NAME - len(end)].rstrip("-") + end


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class S3Location:
    """Location of orc's objects in S3."""

    bucket: str
    prefix: str  # without slashes at its ends; may be empty

    @property
    def uri(self) -> str:
        """URI of the location itself."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def snapshot(self, digest: str) -> str:
        """The objects that jobs with the same code and runtime share; ends with a slash."""
        return f"{self.uri}/snapshots/{digest}/"

    def job(self, job: str) -> str:
        """Return the URI of a job's objects."""
        return f"{self.uri}/jobs/{job}"

    def attempt(self, attempt: AttemptId) -> str:
        """Return the URI of the inputs of an attempt; ends with a slash."""
        return f"{self.job(attempt.job)}/a{attempt.number}/"


def default_bucket(region: str, account: str) -> str:
    """The bucket that the SDK uses too; it is made when it is missing."""
    return f"sagemaker-{region}-{account}"


def is_default_bucket(bucket: str) -> bool:
    """Return True for the default bucket of some account and region."""
    return re.fullmatch(rf"sagemaker-[a-z0-9-]+-([0-9]{{12}}|{ACCOUNT})", bucket) is not None


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of ``s3://bucket/key``."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def partition_of(region: str) -> str:
    """Return the part of AWS that a region belongs to, as in ``arn:<partition>:iam::...``."""
    special = {"cn-": "aws-cn", "us-gov-": "aws-us-gov", "eusc-": "aws-eusc"}
    special |= {"us-iso-": "aws-iso", "us-isob-": "aws-iso-b", "eu-isoe-": "aws-iso-e", "us-isof-": "aws-iso-f"}
    return next((name for start, name in special.items() if region.startswith(start)), "aws")
