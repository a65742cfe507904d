"""Interface to SageMaker, S3 and CloudWatch: `aws` calls AWS, `local` stands in for it on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.errors import BackendError


class NameTaken(BackendError):
    """There is a training job of that name already: ours of an earlier try, or another user's."""


class Service(Protocol):
    """Services of one account and region.

    All methods raise `BackendUnreachable` when there is no answer, `BackendError` otherwise."""

    # -- who we are

    def account(self) -> str:
        """The number of the account that the credentials belong to."""
        ...

    def identity(self) -> str:
        """Return the number of the account from AWS itself, which shows that the credentials work."""
        ...

    def role_problem(self, arn: str) -> str:
        """Return the reason why the role cannot be used, as far as we may look; empty otherwise."""
        ...

    def image(self, image: Image) -> str:
        """The URI of a stock image, from the SDK."""
        ...

    # -- objects; URIs are ``s3://bucket/key``

    def has_bucket(self, bucket: str) -> bool:
        """Return True when the bucket exists. Raises `BackendError` when it belongs to another account."""
        ...

    def create_bucket(self, bucket: str) -> None:
        """Make it, in our region."""
        ...

    def put(self, uri: str, data: bytes | Path, *, kms_key: str | None = None) -> None:
        """Write an object, encrypted, in one step."""
        ...

    def get(self, uri: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """Return at most *limit* bytes of an object from *offset* on; `None` when there is no object."""
        ...

    def get_many(self, uris: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return the contents of the objects that exist and have at most *limit* bytes, fetched in parallel."""
        ...

    def exists(self, uri: str) -> bool:
        """Return True when the object exists."""
        ...

    def delete(self, uri: str) -> None:
        """Remove it, if it is there."""
        ...

    # -- training jobs

    def create(self, request: Mapping[str, Any]) -> None:
        """Start a training job. Raises `NameTaken`, and `AmbiguousSubmit` when it is unknown whether it started."""
        ...

    def describe(self, name: str) -> dict[str, Any] | None:
        """Return the description of a training job; `None` when there is none."""
        ...

    def summaries(self, *, since: float | None = None, name_contains: str = "") -> Iterator[dict[str, Any]]:
        """Jobs, newest first, created after *since* (seconds since the epoch); fetched in pages as they are used."""
        ...

    def tags(self, arn: str) -> dict[str, str]:
        """The tags of a job."""
        ...

    def stop(self, name: str) -> None:
        """Stop a job; one that has ended or is not there is left as it is."""
        ...

    # -- logs

    def streams(self, name: str) -> list[str]:
        """The log streams of a job, ``<job>/algo-<n>-<number>``, oldest first; none while it has not started."""
        ...

    def events(self, stream: str, token: str | None) -> tuple[list[str], str | None]:
        """The next messages of a stream after *token*, and the token to go on with; no messages at its present end."""
        ...

    # -- secrets

    def put_secret(self, name: str, text: str, *, kms_key: str | None = None, tags: Mapping[str, str]) -> None:
        """Create the secret, or replace its value."""
        ...

    def delete_secret(self, name: str) -> None:
        """Remove it at once, if it is there."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
