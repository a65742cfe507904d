"""Submission for a user of the service: whose the job is, what it may use, and one job for one key."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import RenderError, SpecError
from orc.launchers.ids import derived_job_id, new_job_id
from orc.orchestrator.clients.errors import NotAllowed
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.records import JobRecord
from orc.orchestrator.workspace import login_name, no_account

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.client import Client
    from orc.orchestrator.engine.submission import Submission
    from orc.orchestrator.views import JobView
    from orc.orchestrator.workspace import Workspace

_LONGEST_SECRET = 64 << 10


class Submitter:
    """Submitter of jobs of one *user*. With a *key*, the same one is the same job, for as long as the ledger has it.

    *may_take* says whether the user may have what jobs of an owner have left.
    """

    def __init__(self, client: Client, user: str, key: str | None, may_take: Callable[[str], bool]) -> None:
        self._client, self._user, self._may_take = client, user, may_take
        self._request = hashlib.sha256(f"{user}\0{key}".encode()).hexdigest() if key else ""

    def submit(
        self, spec: Mapping[str, Any], digests: Mapping[str, str], source: str, secrets: Mapping[str, str]
    ) -> JobView:
        """Submit a job. Raises `LaunchError`."""
        if not source.isprintable():
            raise SpecError("the source is no path of printable characters", where="source")
        job = checked_spec(spec)
        return self._start(job, lambda: self._snapshot(job, digests), source, secrets)

    def resubmit(self, job_id: str, overrides: Sequence[str], secrets: Mapping[str, str]) -> JobView:
        """Submit a job like another one. Raises `LaunchError`."""
        from orc.orchestrator.engine.attempt_inputs import stored_snapshot
        from orc.orchestrator.engine.changed_spec import changed, digests_left
        from orc.orchestrator.functions.keys import key_of

        ws = self._client.workspace
        old = self._client.job(job_id)
        spec = changed(old.spec, overrides, where=old.id)
        digests = digests_left(old.digests, old.spec, spec)
        # Calls of functions are submitted by the service's own account alone. Whoever else runs such code (it goes by
        # digest) must not get the key that signs what that account unpickles.
        key = key_of(ws.state_dir, old.digests["code"]) if old.owner == login_name() else {}
        return self._start(spec, lambda: stored_snapshot(ws, digests), f"job:{old.id}", {**key, **secrets}, digests)

    def _with_allowed_inputs(self, job: JobSpec, has: Mapping[str, str], stages: Collection[str] = ()) -> JobSpec:
        """Return *job* with the full ids of the jobs whose artefacts it takes; those in *has* were checked before, and
        *stages* are submitted with it.

        Raises `NotAllowed` for artefacts of another user's job, `SpecError` for jobs that are not there.
        """
        from orc.launchers.snapshot.trees import INPUT
        from orc.launchers.spec.relations import artefact
        from orc.orchestrator.engine.dependencies import job_named

        ws = self._client.workspace
        inputs = dict(job.inputs)
        for name, text in job.inputs.items():
            if INPUT + name in has:
                continue
            wanted = artefact(text)
            if wanted.job in stages:
                continue
            source = job_named(ws, wanted.job)
            record = ws.ledger.job(source)
            owner = record.owner if record is not None else ""
            if not self._may_take(owner):
                raise NotAllowed(
                    f"inputs.{name}: {source} belongs to {owner or 'nobody'}: only its owner or an admin may take what "
                    "it has left",
                    where=job.name,
                    hint="`depends_on` may name it; ask its owner to put the files where both may read them",
                )
            inputs[name] = f"{source}.{wanted.output}"
        return job.model_copy(update={"inputs": inputs})

    def _snapshot(self, job: JobSpec, digests: Mapping[str, str]) -> Snapshot:
        """Return the trees of a new job: the client's code, and the runtime of the service's own version."""
        from orc.launchers.backends.base import Snapshot
        from orc.launchers.snapshot.runtime_tree import runtime_bundle
        from orc.orchestrator.engine.snapshots import check_script

        store = self._client.workspace.store
        code = store.load(digests["code"])
        check_script(job, code)
        runtime = store.ingest(runtime_bundle(cache=store.scan_cache))
        return Snapshot(code, runtime, store.load(digests["environment"]) if "environment" in digests else None)

    def _start(
        self,
        job: JobSpec,
        snapshot: Callable[[], Snapshot],
        source: str,
        secrets: Mapping[str, str],
        has: Mapping[str, str] = MappingProxyType({}),
    ) -> JobView:
        from orc.orchestrator.engine.submission import submit

        earlier, new_id = self._look(job.name) if self._request else (None, "")
        if earlier is not None:
            return self._client.job(earlier.id)
        if unknown := sorted(secrets.keys() - set(job.secrets)):
            raise SpecError(f"{unknown[0][:80]!r} is no secret of the job", where="secrets")
        job, trees = self._checked(job, snapshot, secrets, has)
        new = self._submission(job, trees, new_id or new_job_id(job.name), source, secrets)
        try:
            submit(self._client.workspace, [new])
            return self._client.job(new.id)
        except LedgerError:
            earlier, _ = self._look(job.name) if self._request else (None, "")
            if earlier is None:
                raise
            return self._client.job(earlier.id)  # the same request came twice at once

    def _submission(
        self, job: JobSpec, trees: Snapshot, job_id: str, source: str, secrets: Mapping[str, str]
    ) -> Submission:
        """Return the submission of a job that has passed all checks: the user's, with sealed secrets."""
        from orc.orchestrator.engine.submission import Submission

        return Submission(job, trees, self._user, job_id, source, secrets, sealed=True, request=self._request)

    def _checked(
        self,
        job: JobSpec,
        snapshot: Callable[[], Snapshot],
        secrets: Mapping[str, str],
        has: Mapping[str, str] = MappingProxyType({}),
        stages: Collection[str] = (),
    ) -> tuple[JobSpec, Snapshot]:
        """Return what is submitted of *job*, after all checks that every job of a user has to pass. Raises
        `LaunchError`.
        """
        job = self._with_allowed_inputs(job, has, stages)
        _check_secrets(job, secrets)
        cluster = self._client.workspace.backend(job.cluster).cluster
        refuse_without_account(self._client.workspace, job.cluster, self._user)
        trees = snapshot()
        _check_environment(job, trees, cluster)
        return job, trees

    def _look(self, name: str) -> tuple[JobRecord | None, str]:
        """Return the job that a request with this key has made; without one, the id that it is to have."""
        ledger = self._client.workspace.ledger
        for number in itertools.count():
            job_id = derived_job_id(name, f"{self._request}/{number}")
            job = ledger.job(job_id)
            if self._made_by(job) if job is not None else not self._was_removed(job_id):
                return job, job_id
        raise AssertionError("unreachable")

    def _was_removed(self, job_id: str) -> bool:
        """Return True for the id of a job that the ledger once had: its cluster would take a new one for that job."""
        from orc.orchestrator.ledger.prune import was_pruned

        with self._client.workspace.ledger.database.read() as connection:
            return bool(was_pruned(connection, [job_id]))

    def _made_by(self, job: JobRecord) -> bool:
        events = self._client.workspace.ledger.events(job.id)
        return bool(events) and events[0].data.get("request") == self._request


def checked_spec(spec: Mapping[str, Any]) -> JobSpec:
    """Return the specification, validated as any job file. Raises `SpecError`."""
    from pydantic import ValidationError

    from orc.launchers.spec import JobSpec

    try:
        return JobSpec.model_validate(spec)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(str(first["msg"]), where=f"spec.{where}"[:200]) from None
    except (TypeError, ValueError, RecursionError):
        raise SpecError("the specification is none that a job can have", where="spec") from None


def _check_secrets(job: JobSpec, secrets: Mapping[str, str]) -> None:
    """Raise `SpecError` unless there is a value for each secret of *job*: those of the service's own environment, files
    and keyring are nobody's to ask for.
    """
    if missing := [name for name in job.secrets if not secrets.get(name)]:
        raise SpecError(
            f"no value was sent for the secret{'s' if len(missing) > 1 else ''} {', '.join(missing)}", where="secrets"
        )
    for name, value in secrets.items():
        if "\0" in value or len(value) > _LONGEST_SECRET:
            raise SpecError(f"the secret {name} is longer than 64 KiB, or no text", where="secrets")


def _check_environment(job: JobSpec, trees: Snapshot, cluster: Any) -> None:
    """Raise `RenderError` for an environment that has to be brought along and was not."""
    from orc.launchers.environments.rendering import environment_of

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
