"""Desk of one request: it takes submissions of its user, who has to have sent what they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.orchestrator.clients.errors import SnapshotMissing
from orc.orchestrator.service.contents import missing_contents, missing_trees
from orc.orchestrator.service.submitting_groups import GroupSubmitter, WantedMember

if TYPE_CHECKING:
    from orc.orchestrator.api.submissions import NewMember
    from orc.orchestrator.client import Client
    from orc.orchestrator.clients.group_views import GroupView, ScheduleView
    from orc.orchestrator.service.auth import Principal
    from orc.orchestrator.views import JobView


class ServiceDesk:
    """Takes submissions of *principal*, with the *key* of the request; its methods are those of `Desk`."""

    def __init__(self, client: Client, principal: Principal, key: str, max_upload: int) -> None:
        self._client, self._user, self._max_upload = client, principal.user, max_upload
        self._submitter = GroupSubmitter(client, principal.user, key or None, principal.may_change)

    def submit(
        self, spec: Mapping[str, Any], digests: Mapping[str, str], source: str, secrets: Mapping[str, str]
    ) -> JobView:
        """Submit a job. Raises `LaunchError`."""
        self._refuse_missing(digests.values())
        return self._submitter.submit(spec, digests, source, secrets)

    def resubmit(self, job_id: str, overrides: Sequence[str], secrets: Mapping[str, str]) -> JobView:
        """Submit a job like another one. Raises `LaunchError`."""
        return self._submitter.resubmit(job_id, overrides, secrets)

    def submit_group(
        self,
        kind: str,
        name: str,
        max_parallel: int | None,
        members: Sequence[NewMember],
        source: str,
        secrets: Mapping[str, str],
    ) -> GroupView:
        """Submit all members of a group, or none. Raises `LaunchError`."""
        self._refuse_missing(digest for member in members for digest in member.digests.given().values())
        wanted = [
            WantedMember(member.index, member.spec, member.digests.given(), member.stage, member.parameters)
            for member in members
        ]
        return self._submitter.submit_group(kind, name, max_parallel, wanted, source, secrets)

    def retry_group(self, group_id: str, secrets: Mapping[str, str]) -> GroupView:
        """Submit the members of a group that have ended without success once more. Raises `LaunchError`."""
        return self._submitter.retry_group(group_id, secrets)

    def create_schedule(
        self,
        spec: Mapping[str, Any],
        digests: Mapping[str, str],
        source: str,
        secrets: Mapping[str, str],
        when: Mapping[str, str],
    ) -> ScheduleView:
        """Store a schedule. Raises `LaunchError`."""
        self._refuse_missing(digests.values())
        return self._submitter.create_schedule(spec, digests, source, secrets, when)

    def missing_contents(self, hashes: Sequence[str]) -> tuple[list[str], int]:
        """Return the contents that the user has to send, and the bytes that one upload may have."""
        ws = self._client.workspace
        return missing_contents(ws.store, ws.ledger, self._user, hashes), self._max_upload

    def _refuse_missing(self, digests: Iterable[str]) -> None:
        """Raise `SnapshotMissing` for trees that the user has not uploaded."""
        missing = missing_trees(self._client, self._user, list(dict.fromkeys(digests)))
        if missing:
            error = SnapshotMissing("the service lacks the code of the job", where="digests", hint="upload it first")
            error.digests = tuple(missing)
            raise error
