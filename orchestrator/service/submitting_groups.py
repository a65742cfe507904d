"""Submission of groups and schedules for a user of the service: each member passes the checks of a single job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orc.launchers.errors import SpecError
from orc.launchers.ids import derived_job_id, new_job_id
from orc.orchestrator.clients import groups
from orc.orchestrator.clients.group_views import GroupView, ScheduleView
from orc.orchestrator.ledger import groups as group_rows
from orc.orchestrator.ledger import schedules as schedule_rows
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.service.submitting import Submitter, checked_spec

if TYPE_CHECKING:
    from typing import Any

    from orc.launchers.backends.base import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.engine.submission import Submission


@dataclass(frozen=True)
class WantedMember:
    """Member of a group that is to be submitted."""

    number: int
    spec: Mapping[str, Any]
    digests: Mapping[str, str]
    stage: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


class GroupSubmitter(Submitter):
    """Submitter of groups and schedules of one user; as `Submitter`, one of each for one key."""

    def submit_group(
        self,
        kind: str,
        name: str,
        max_parallel: int | None,
        members: Sequence[WantedMember],
        source: str,
        secrets: Mapping[str, str],
    ) -> GroupView:
        """Submit all members, or none. Raises `LaunchError`."""
        from orc.orchestrator.engine.groups import as_member, submit_group

        ws = self._client.workspace
        if not (source.isprintable() and name.isprintable()):
            raise SpecError("name and source are printable characters", where="source")
        group_id = self._derived(name)
        if self._request and self._has_group(group_id):
            return groups.view(ws, group_id)
        specs = [self._spec_of(member) for member in members]
        stages = _checked_stages(kind, members, specs)
        _refuse_unknown(specs, secrets)
        described = groups.description({member.number: (member.parameters, member.stage) for member in members})
        described["request"] = self._request
        group = group_rows.GroupRecord(group_id, kind, name, self._user, ws.clock(), max_parallel, described)
        trees: dict[str, Snapshot] = {}
        submissions, new_id = [], self._ids(group_id)
        for member, spec in zip(members, specs, strict=True):
            job, snapshot = self._checked(spec, self._shared(trees, spec, member.digests), secrets, stages=stages)
            job = as_member(job, group)
            new = self._submission(job, snapshot, new_id(job.name), source, secrets)
            submissions.append(replace(new, group=group.id, number=member.number, stage=member.stage))
        try:
            submit_group(ws, submissions, group)
        except LedgerError:
            if not (self._request and self._has_group(group_id)):
                raise  # else the same request came twice at once
        return groups.view(ws, group.id)

    def retry_group(self, group_id: str, secrets: Mapping[str, str]) -> GroupView:
        """Submit the members of a group that have ended without success once more. Raises `LaunchError`."""
        from orc.orchestrator.engine.submission import enqueue

        ws = self._client.workspace
        groups.record_of(ws, group_id)
        if self._has_retried(group_id):
            return groups.view(ws, group_id)
        again = groups.submissions_again(ws, group_id)
        stages = {one.stage for one in again}
        new_id = self._ids(group_id)
        submissions = [self._again(one, new_id(one.spec.name), secrets, stages) for one in again]
        try:
            enqueue(ws, submissions)
        except LedgerError:
            if not self._has_retried(group_id):
                raise
        return groups.view(ws, group_id)

    def create_schedule(
        self,
        spec: Mapping[str, Any],
        digests: Mapping[str, str],
        source: str,
        secrets: Mapping[str, str],
        when: Mapping[str, str],
    ) -> ScheduleView:
        """Store a schedule; *when* has the other arguments of `orc.orchestrator.engine.schedules.create`."""
        from orc.orchestrator.engine import schedules

        ws = self._client.workspace
        if not (source.isprintable() and when["name"].isprintable()):
            raise SpecError("name and source are printable characters", where="source")
        schedule_id = self._derived(when["name"])
        if (earlier := self._schedule(schedule_id)) is not None:
            return earlier
        job = checked_spec(spec)
        schedules.check(job, when["cron"], when["timezone"])
        _refuse_unknown([job], secrets)
        job, trees = self._checked(job, lambda: self._snapshot(job, digests), secrets)
        try:
            made = schedules.create(ws, self._submission(job, trees, schedule_id, source, secrets), **when)
        except (LedgerError, SpecError):
            if (earlier := self._schedule(schedule_id)) is None:
                raise
            return earlier
        return ScheduleView.of(made)

    def _spec_of(self, member: WantedMember) -> JobSpec:
        spec = checked_spec(member.spec)
        if spec.sweep is not None or spec.array is not None:
            raise SpecError("a member of a group is one job, no sweep or array", where=f"members.{member.number}")
        return spec

    def _shared(self, trees: dict[str, Snapshot], spec: JobSpec, digests: Mapping[str, str]) -> Callable[[], Snapshot]:
        """Return a loader of the snapshots of *digests*: each is loaded once for all members that have it."""
        from orc.orchestrator.engine.snapshots import check_script

        key = repr(sorted(digests.items()))

        def load() -> Snapshot:
            if key not in trees:
                trees[key] = self._snapshot(spec, digests)
            check_script(spec, trees[key].code)
            return trees[key]

        return load

    def _again(self, one: Submission, job_id: str, secrets: Mapping[str, str], stages: set[str]) -> Submission:
        spec, trees = self._checked(one.spec, lambda: one.snapshot, secrets, one.snapshot.digests, stages)
        new = self._submission(spec, trees, job_id, one.source, secrets)
        return replace(new, group=one.group, number=one.number, stage=one.stage)

    def _derived(self, name: str) -> str:
        return derived_job_id(name, f"{self._request}/group") if self._request else new_job_id(name)

    def _ids(self, group_id: str) -> Callable[[str], str]:
        """Return a source of ids of new jobs: with a key always the same ones, so that two requests collide."""
        if not self._request:
            return new_job_id
        numbers = itertools.count()

        def made(name: str) -> str:
            ids = (derived_job_id(name, f"{self._request}/{group_id}/{number}") for number in numbers)
            return next(job_id for job_id in ids if not self._was_removed(job_id))

        return made

    def _has_group(self, group_id: str) -> bool:
        with self._client.workspace.ledger.database.read() as connection:
            found = group_rows.find(connection, group_id)
        return found is not None and found.spec.get("request") == self._request

    def _has_retried(self, group_id: str) -> bool:
        if not self._request:
            return False
        with self._client.workspace.ledger.database.read() as connection:
            return group_rows.has_job_of(connection, group_id, self._request)

    def _schedule(self, schedule_id: str) -> ScheduleView | None:
        """Return the schedule that a request with this key has made."""
        if not self._request:
            return None
        with self._client.workspace.ledger.database.read() as connection:
            found = schedule_rows.find(connection, schedule_id)
        made = found is not None and found.spec.get("request") == self._request
        return ScheduleView.of(found) if found is not None and made else None


def _checked_stages(kind: str, members: Sequence[WantedMember], specs: Sequence[JobSpec]) -> set[str]:
    """Return the stages of a pipeline. Raises `SpecError` for members that are no group of that *kind*."""
    from orc.launchers.spec.groups import cycle, stages_before

    stages = [member.stage for member in members]
    if len({member.number for member in members}) < len(members):
        raise SpecError("two members have the same index", where="members")
    if kind != "pipeline":
        if any(stages):
            raise SpecError(f"the jobs of a {kind} are no stages", where="members")
        return set()
    if not all(stages) or len(set(stages)) < len(stages):
        raise SpecError("each job of a pipeline has a stage of its own", where="members")
    before = {stage: stages_before(spec, stages) for stage, spec in zip(stages, specs, strict=True)}
    if circle := cycle(before):
        raise SpecError(f"they wait for each other: {' -> '.join([*circle, circle[0]])}", where="members")
    return set(stages)


def _refuse_unknown(specs: Sequence[JobSpec], secrets: Mapping[str, str]) -> None:
    if unknown := sorted(secrets.keys() - {name for spec in specs for name in spec.secrets}):
        raise SpecError(f"{unknown[0][:80]!r} is no secret of these jobs", where="secrets")
