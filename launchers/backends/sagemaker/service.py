"""What the backend asks of SageMaker, S3 and CloudWatch. `aws` does it at AWS, `local` on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.errors import BackendError


class NameTaken(BackendError):
    """There is a training job of that name already: ours of an earlier try, or somebody else's."""


class Service(Protocol):
    """One account and region. All methods raise `BackendUnreachable` when nobody answers, `BackendError` otherwise."""

    # -- who we are

    def account(self) -> str:
        """The number of the account that the credentials belong to."""
        ...

    def identity(self) -> str:
        """The same, asked of AWS in any case: whether the credentials are good shows there."""
        ...

    def role_problem(self, arn: str) -> str:
        """Why the role cannot be used, as far as we are allowed to know; empty otherwise."""
        ...

    def image(self, image: Image) -> str:
        """The URI of a stock image, from the SDK."""
        ...

    # -- objects; URIs are ``s3://bucket/key``

    def has_bucket(self, bucket: str) -> bool:
        """Whether it is there. Raises `BackendError` when it is somebody else's."""
        ...

    def create_bucket(self, bucket: str) -> None:
        """Make it, in our region."""
        ...

    def put(self, uri: str, data: bytes | Path, *, kms_key: str | None = None) -> None:
        """Write an object, encrypted, in one step."""
        ...

    def get(self, uri: str, offset: int = 0) -> bytes | None:
        """Its content from *offset* on; `None` when there is none."""
        ...

    def get_many(self, uris: Sequence[str]) -> dict[str, bytes]:
        """Those that are there, fetched side by side."""
        ...

    def exists(self, uri: str) -> bool:
        """Whether there is such an object."""
        ...

    def delete(self, uri: str) -> None:
        """Remove it, if it is there."""
        ...

    # -- training jobs

    def create(self, request: Mapping[str, Any]) -> None:
        """Start a training job. Raises `NameTaken`, and `AmbiguousSubmit` when nobody can tell whether it started."""
        ...

    def describe(self, name: str) -> dict[str, Any] | None:
        """All about one job; `None` when there is none."""
        ...

    def summaries(self, *, since: float | None = None, name_contains: str = "") -> Iterator[dict[str, Any]]:
        """Jobs, newest first, created after *since* (seconds since the epoch); fetched in pages as they are used."""
        ...

    def tags(self, arn: str) -> dict[str, str]:
        """The tags of a job."""
        ...

    def stop(self, name: str) -> None:
        """Ask a job to end; one that has ended or is not there is left as it is."""
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
