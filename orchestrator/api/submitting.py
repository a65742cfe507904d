"""Submission of what the caller of a service has sent: whose it is, what it may use, and one of each for one key.

Jobs, groups and schedules are made of members as they are sent (`NewMember`), each of which passes the same checks.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from orc.launchers.backends.base import Snapshot
from orc.launchers.errors import LaunchError, RenderError, SpecError
from orc.launchers.ids import derived_job_id, new_job_id
from orc.launchers.snapshot.manifest import INPUT
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.snapshot.tree_store import CONTENT_TIME_NS
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import environment_of
from orc.launchers.spec.groups import cycle, stages_before
from orc.launchers.spec.relations import artefact
from orc.orchestrator.api.call import NotAllowed, SnapshotMissing
from orc.orchestrator.clients import groups
from orc.orchestrator.engine import schedules
from orc.orchestrator.engine.attempt_inputs import changed, digests_left, stored_snapshot
from orc.orchestrator.engine.job_source import check_script
from orc.orchestrator.engine.submission import Submission, as_member, enqueue, submit, submit_group
from orc.orchestrator.ledger import content_holders
from orc.orchestrator.ledger import groups as group_rows
from orc.orchestrator.ledger import schedules as schedule_rows
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.ledger.prune import was_pruned
from orc.orchestrator.views import GroupView, ScheduleView
from orc.orchestrator.workspace import login_name, no_account

if TYPE_CHECKING:
    from orc.orchestrator.api.call import NewMember
    from orc.orchestrator.api.session import LedgerSession
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.views import JobView
    from orc.orchestrator.workspace import Workspace

Made = TypeVar("Made")
_LONGEST_SECRET = 64 << 10
_storing = threading.Lock()  # of the runtime: some hundred files


class Submitter:
    """Submitter of jobs, groups and schedules of the caller of *session*. All methods raise `LaunchError`.

    With a *key* of the request, the same one is the same job, group or schedule, for as long as the ledger has it.
    """

    def __init__(self, session: LedgerSession, key: str) -> None:
        if not session.serves:
            raise LaunchError("only a service takes that request", hint="`Client.submit` submits without a service")
        self._session, self._ws, self._user = session, session.workspace, session.caller.user
        self._request = hashlib.sha256(f"{self._user}\0{key}".encode()).hexdigest() if key else ""

    def submit(self, member: NewMember, source: str, secrets: Mapping[str, str]) -> JobView:
        """Submit a job."""
        self._refuse_missing([member])
        _refuse_unprintable(source)
        spec = checked_spec(member.spec)
        return self._start(spec, self._loader({}, spec, member), source, secrets)

    def resubmit(self, job_id: str, overrides: Sequence[str], secrets: Mapping[str, str]) -> JobView:
        """Submit a job like another one."""
        from orc.orchestrator.functions.calls import key_of

        old = self._session.job(job_id)
        spec = changed(old.spec, overrides, where=old.id)
        digests = digests_left(old.digests, old.spec, spec)
        # Calls of functions are submitted by the service's own account alone. Whoever else runs such code (it goes by
        # digest) must not get the key that signs what that account unpickles.
        key = key_of(self._ws.state_dir, old.digests["code"]) if old.owner == login_name() else {}
        load = lambda: stored_snapshot(self._ws, digests)  # noqa: E731
        return self._start(spec, load, f"job:{old.id}", {**key, **secrets}, digests)

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
        self._refuse_missing(members)
        _refuse_unprintable(source, name)
        group_id = self._derived(name)

        def make() -> GroupView:
            specs = [_spec_of(member) for member in members]
            stages = _checked_stages(kind, members, specs)
            _refuse_unknown(specs, secrets)
            described = groups.description({member.index: (member.parameters, member.stage) for member in members})
            described["request"] = self._request
            now = self._ws.clock()
            group = group_rows.GroupRecord(group_id, kind, name, self._user, now, max_parallel, described)
            trees: dict[str, Snapshot] = {}
            submissions, new_id = [], self._ids(group_id)
            for member, spec in zip(members, specs, strict=True):
                job, load = as_member(spec, group), self._loader(trees, spec, member)
                new = self._submission(job, load, new_id(job.name), source, secrets, stages=stages)
                submissions.append(replace(new, group=group.id, number=member.index, stage=member.stage))
            submit_group(self._ws, submissions, group)
            return groups.view(self._ws, group_id)

        return self._once(lambda: groups.view(self._ws, group_id) if self._has_group(group_id) else None, make)

    def retry_group(self, group_id: str, secrets: Mapping[str, str]) -> GroupView:
        """Submit the members of a group that have ended without success once more."""
        groups.record_of(self._ws, group_id)

        def make() -> GroupView:
            again = groups.submissions_again(self._ws, group_id)
            stages = {old.stage for old in again}
            new_id = self._ids(group_id)
            submissions = []
            for old in again:
                load = lambda old=old: old.snapshot  # noqa: E731
                job_id, has = new_id(old.spec.name), old.snapshot.digests
                new = self._submission(old.spec, load, job_id, old.source, secrets, has, stages)
                submissions.append(replace(new, group=old.group, number=old.number, stage=old.stage))
            enqueue(self._ws, submissions)
            return groups.view(self._ws, group_id)

        return self._once(lambda: groups.view(self._ws, group_id) if self._has_retried(group_id) else None, make)

    def create_schedule(
        self, member: NewMember, source: str, secrets: Mapping[str, str], when: Mapping[str, str]
    ) -> ScheduleView:
        """Store a schedule; *when* has the other arguments of `orc.orchestrator.engine.schedules.create`."""
        self._refuse_missing([member])
        _refuse_unprintable(source, when["name"])
        schedule_id = self._derived(when["name"])

        def make() -> ScheduleView:
            spec = checked_spec(member.spec)
            schedules.check(spec, when["cron"], when["timezone"])
            _refuse_unknown([spec], secrets)
            new = self._submission(spec, self._loader({}, spec, member), schedule_id, source, secrets)
            return ScheduleView.of(schedules.create(self._ws, new, **when))

        # Of two requests at once the second gets the error that there is a schedule of that name.
        return self._once(lambda: self._schedule(schedule_id), make, (LedgerError, SpecError))

    # -- one of each for one key

    def _once(
        self,
        earlier: Callable[[], Made | None],
        make: Callable[[], Made],
        lost: tuple[type[LaunchError], ...] = (LedgerError,),
    ) -> Made:
        """Return what a request with this key has made, else what *make* makes now.

        It raises one of *lost* also where the same request came twice at once, and the other one was faster.
        """
        if self._request and (made := earlier()) is not None:
            return made
        try:
            return make()
        except lost:
            if not self._request or (made := earlier()) is None:
                raise
            return made

    def _start(
        self,
        spec: JobSpec,
        load: Callable[[], Snapshot],
        source: str,
        secrets: Mapping[str, str],
        has: Mapping[str, str] = MappingProxyType({}),
    ) -> JobView:
        new_id = new_job_id(spec.name)

        def earlier() -> JobView | None:
            nonlocal new_id
            found, new_id = self._look(spec.name)
            return self._session.job(found.id) if found is not None else None

        def make() -> JobView:
            _refuse_unknown([spec], secrets)
            submit(self._ws, [self._submission(spec, load, new_id, source, secrets, has)])
            return self._session.job(new_id)

        return self._once(earlier, make)

    def _look(self, name: str) -> tuple[JobRecord | None, str]:
        """Return the job that a request with this key has made; without one, the id that it is to have."""
        for number in itertools.count():
            job_id = derived_job_id(name, f"{self._request}/{number}")
            job = self._ws.ledger.job(job_id)
            if self._made_by(job) if job is not None else not self._was_removed(job_id):
                return job, job_id
        raise AssertionError("unreachable")

    def _made_by(self, job: JobRecord) -> bool:
        events = self._ws.ledger.events(job.id)
        return bool(events) and events[0].data.get("request") == self._request

    def _was_removed(self, job_id: str) -> bool:
        """Return True for the id of a job that the ledger once had: its cluster would take a new one for that job."""
        with self._ws.ledger.database.read() as connection:
            return bool(was_pruned(connection, [job_id]))

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
        with self._ws.ledger.database.read() as connection:
            found = group_rows.find(connection, group_id)
        return found is not None and found.spec.get("request") == self._request

    def _has_retried(self, group_id: str) -> bool:
        with self._ws.ledger.database.read() as connection:
            return group_rows.has_job_of(connection, group_id, self._request)

    def _schedule(self, schedule_id: str) -> ScheduleView | None:
        """Return the schedule that a request with this key has made."""
        with self._ws.ledger.database.read() as connection:
            found = schedule_rows.find(connection, schedule_id)
        return ScheduleView.of(found) if found and found.spec.get("request") == self._request else None

    # -- checks that every job of a user has to pass

    def _refuse_missing(self, members: Sequence[NewMember]) -> None:
        """Raise `SnapshotMissing` for trees that the user has not uploaded; those that are here stay for a while."""
        digests = list(dict.fromkeys(digest for member in members for digest in member.digests.given().values()))
        known = _held(self._ws, self._user, digests)
        missing = [digest for digest in digests if digest not in known or not self._ws.store.use(digest)]
        if missing:
            error = SnapshotMissing("the service lacks the code of the job", where="digests", hint="upload it first")
            error.digests = tuple(missing)
            raise error

    def _submission(
        self,
        job: JobSpec,
        load: Callable[[], Snapshot],
        job_id: str,
        source: str,
        secrets: Mapping[str, str],
        has: Mapping[str, str] = MappingProxyType({}),
        stages: Collection[str] = (),
    ) -> Submission:
        """Return the submission of a job after all checks: the user's, with encrypted secrets.

        *has* and *stages* as of `_with_allowed_inputs`.
        """
        job = self._with_allowed_inputs(job, has, stages)
        _check_secrets(job, secrets)
        cluster = self._ws.backend(job.cluster).cluster
        refuse_without_account(self._ws, job.cluster, self._user)
        trees = load()
        _check_environment(job, trees, cluster)
        return Submission(job, trees, self._user, job_id, source, secrets, encrypted=True, request=self._request)

    def _with_allowed_inputs(self, job: JobSpec, has: Mapping[str, str], stages: Collection[str] = ()) -> JobSpec:
        """Return *job* with the full ids of the jobs whose artefacts it takes; those in *has* were checked before, and
        *stages* are submitted with it.

        Raises `NotAllowed` for artefacts of another user's job, `SpecError` for jobs that are not there.
        """
        inputs = dict(job.inputs)
        for name, text in job.inputs.items():
            if INPUT + name in has:
                continue
            wanted = artefact(text)
            if wanted.job in stages:
                continue
            source = self._ws.ledger.resolve(wanted.job, where=f"inputs.{name}")
            record = self._ws.ledger.job(source)
            owner = record.owner if record is not None else ""
            if not self._session.caller.may_change(owner):
                whose = f"inputs.{name}: {source} belongs to {owner or 'nobody'}"
                hint = "`depends_on` may name it; ask its owner to put the files where both may read them"
                raise NotAllowed(
                    f"{whose}: only its owner or an admin may take what it has left", where=job.name, hint=hint
                )
            inputs[name] = f"{source}.{wanted.output}"
        return job.model_copy(update={"inputs": inputs})

    def _loader(self, trees: dict[str, Snapshot], spec: JobSpec, member: NewMember) -> Callable[[], Snapshot]:
        """Return a loader of a member's snapshot: its own code, and the runtime of the service's own version.

        Each one is loaded once into *trees* for all members that have it.
        """
        ws, store, sent = self._ws, self._ws.store, member.digests

        def load() -> Snapshot:
            key = repr(sent)
            if key not in trees:
                code = store.load(sent.code)
                runtime = ws.runtime
                if runtime is None or not store.use(runtime.digest):
                    with _storing:  # the first of many that come at once; the others find it
                        runtime = ws.runtime = store.ingest(runtime_bundle(cache=store.scan_cache))
                trees[key] = Snapshot(code, runtime, store.load(sent.environment) if sent.environment else None)
            check_script(spec, trees[key].code)
            return trees[key]

        return load


def missing_contents(ws: Workspace, user: str, hashes: Sequence[str]) -> list[str]:
    """Return those of *hashes* whose contents *user* has to send, each once: they are not in the store, or the user has
    never had them, as far as is known. Which of the two it is, nobody is told.
    """
    wanted = list(dict.fromkeys(hashes))
    known = _held(ws, user, wanted)
    return [sha256 for sha256 in wanted if sha256 not in known or not _is_stored(ws, sha256)]


def _held(ws: Workspace, user: str, digests: Sequence[str]) -> set[str]:
    """Return those of *digests* whose contents *user* is known to have had."""
    with ws.ledger.database.read() as connection:
        return content_holders.held(connection, user, digests)


def _is_stored(ws: Workspace, sha256: str) -> bool:
    try:
        status = os.lstat(f"{ws.store.root}/cas/{sha256}")
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_mtime_ns == CONTENT_TIME_NS


def _refuse_unprintable(source: str, name: str = "") -> None:
    if not (source.isprintable() and name.isprintable()):
        raise SpecError("name and source are printable characters", where="source")


def _spec_of(member: NewMember) -> JobSpec:
    spec = checked_spec(member.spec)
    if spec.sweep is not None or spec.array is not None:
        raise SpecError("a member of a group is one job, no sweep or array", where=f"members.{member.index}")
    return spec


def checked_spec(spec: Mapping[str, Any]) -> JobSpec:
    """Return the specification, validated as any job file. Raises `SpecError`."""
    try:
        return JobSpec.model_validate(spec)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(str(first["msg"]), where=f"spec.{where}"[:200]) from None
    except (TypeError, ValueError, RecursionError):
        raise SpecError("no job can have this specification", where="spec") from None


def _check_secrets(job: JobSpec, secrets: Mapping[str, str]) -> None:
    """Raise `SpecError` unless there is a value for each secret of *job*: those of the service's own environment, files
    and keyring are nobody's to ask for.
    """
    if missing := [name for name in job.secrets if not secrets.get(name)]:
        what = f"no value was sent for the secret{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise SpecError(what, where="secrets")
    for name, value in secrets.items():
        if "\0" in value or len(value) > _LONGEST_SECRET:
            raise SpecError(f"the secret {name} is longer than 64 KiB, or no text", where="secrets")


def _check_environment(job: JobSpec, trees: Snapshot, cluster: Any) -> None:
    """Raise `RenderError` for an environment that has to be brought along and was not."""
    wanted = environment_of(job, cluster)
    packed = wanted.copied is not None or (wanted.conda is not None and wanted.conda.file is None)
    if packed and trees.environment is None:
        raise RenderError(
            f"the cluster {cluster.name} wants an environment that is brought along, and none was",
            where="environment",
            hint="name the environment in the job file itself",
        )


def refuse_without_account(ws: Workspace, cluster: str, user: str) -> None:
    """Raise `LaunchError` where jobs of *user* have no account on *cluster*.

    With ``run_as: service`` everybody's jobs run as the account of the service, with a mapping each as the account of
    its owner. Without either only the user who has the service's account may use the cluster: a job can do whatever its
    account can, so lending it has to be said.
    """
    run_as = ws.backend(cluster).cluster.run_as
    if isinstance(run_as, dict):
        ws.backend_of_user(cluster, user)  # opened, so that an account that cannot be used is known now
    elif run_as != "service" and user != login_name():
        raise no_account(cluster, user)


def _checked_stages(kind: str, members: Sequence[NewMember], specs: Sequence[JobSpec]) -> set[str]:
    """Return the stages of a pipeline. Raises `SpecError` for members that are no group of that *kind*."""
    stages = [member.stage for member in members]
    if len({member.index for member in members}) < len(members):
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
        whose = "the job" if len(specs) == 1 else "these jobs"
        raise SpecError(f"{unknown[0][:80]!r} is no secret of {whose}", where="secrets")
