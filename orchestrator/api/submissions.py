"""Submissions to a service: what they are made of, and what takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from orc.orchestrator.api.call import Bounds, Text

if TYPE_CHECKING:
    from orc.orchestrator.clients.group_views import GroupView, ScheduleView
    from orc.orchestrator.views import JobView

Digest = Annotated[str, Bounds(pattern="^[0-9a-f]{64}$")]
Stage = Annotated[str, Bounds(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]*)?$")]


@dataclass(frozen=True)
class Digests:
    """Trees that a job is made of."""

    code: Digest
    environment: Digest | None = None

    def given(self) -> dict[str, str]:
        """Return those that there are."""
        return {name: digest for name, digest in vars(self).items() if digest is not None}


@dataclass(frozen=True)
class NewMember:
    """Member of a new group: what it has beside the keys that are `shared`."""

    index: Annotated[int, Bounds(ge=0, lt=1 << 31)]
    digests: Digests
    spec: Mapping[str, Any] = field(default_factory=dict)
    stage: Stage = ""
    parameters: Annotated[Mapping[Text, Text], Bounds(max_length=100)] = field(default_factory=dict)


class Desk(Protocol):
    """Takes submissions of one user of a service (`orc.orchestrator.service.desk`). All methods raise `LaunchError`."""

    def submit(
        self, spec: Mapping[str, Any], digests: Mapping[str, str], source: str, secrets: Mapping[str, str]
    ) -> JobView:
        """Submit a job."""
        ...

    def resubmit(self, job_id: str, overrides: Sequence[str], secrets: Mapping[str, str]) -> JobView:
        """Submit a job like another one."""
        ...

    def submit_group(
        self,
        kind: str,
        name: str,
        max_parallel: int | None,
        members: Sequence[NewMember],
        source: str,
        secrets: Mapping[str, str],
    ) -> GroupView:
        """Submit all members of a group, or none."""
        ...

    def retry_group(self, group_id: str, secrets: Mapping[str, str]) -> GroupView:
        """Submit the members of a group that have ended without success once more."""
        ...

    def create_schedule(
        self,
        spec: Mapping[str, Any],
        digests: Mapping[str, str],
        source: str,
        secrets: Mapping[str, str],
        when: Mapping[str, str],
    ) -> ScheduleView:
        """Store a schedule."""
        ...

    def missing_contents(self, hashes: Sequence[str]) -> tuple[list[str], int]:
        """Return the contents that the user has to send, and the bytes that one upload may have."""
        ...
