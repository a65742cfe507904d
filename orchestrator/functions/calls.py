"""Submission of calls of Python functions as jobs (docs/how-to/python-functions.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import SpecError

if TYPE_CHECKING:
    from orc.orchestrator.functions.jobs import Call
    from orc.orchestrator.workspace import Workspace


def submit_calls(
    ws: Workspace,
    calls: Sequence[Call],
    *,
    many: bool = False,
    cluster: str = "local",
    resources: Mapping[str, Any] | None = None,
    name: str | None = None,
    at_once: int | None = None,
    max_timeouts: int = 3,
    job: Mapping[str, Any] | None = None,
) -> list[str]:
    """Submit a job for each of *calls*, ``(function, args, kwargs)``; *many* are a map. Return the ids of the jobs.

    The other arguments are those of `Client.map_functions`.
    """
    from orc.launchers.backends.base import SupportsArrays
    from orc.launchers.ids import new_job_id
    from orc.launchers.spec.load import LoadedJob
    from orc.orchestrator.engine import snapshots
    from orc.orchestrator.engine.groups import submit_group
    from orc.orchestrator.engine.progress import silent
    from orc.orchestrator.engine.submission import new_submission, submit
    from orc.orchestrator.functions import jobs as functions
    from orc.orchestrator.functions.keys import new_key
    from orc.orchestrator.ledger.groups import GroupRecord

    backend = ws.backend(cluster)
    name = name or functions.name_of(calls[0][0])
    saves = any(functions.saves(fn) for fn, _, _ in calls)
    spec = functions.specification(cluster, name, resources, job, saves=saves)
    arrays = isinstance(backend, SupportsArrays)
    if at_once is not None:
        _check_limit(at_once, spec.resources.time_s, arrays=arrays, here=not backend.is_remote, where=name)
    group = new_job_id(name)
    settings = functions.Settings(group, max_timeouts, None if arrays else at_once, backend.is_remote)
    with functions.packed(calls, spec, settings) as tree:
        code = ws.store.ingest(tree)
    snapshot = snapshots.with_code(ws.store, LoadedJob(spec, Path(), Path.cwd()), code, backend, silent)
    specs = [
        spec.model_copy(
            update={
                "args": (str(number),),
                "tags": {**spec.tags, functions.MAP_TAG: group, functions.CALL_TAG: str(number)},
            }
        )
        for number in range(len(calls))
    ] if many else [spec]  # fmt: skip
    source = f"function:{name}"
    key = new_key(ws.state_dir, snapshot.code.digest)
    submissions = [new_submission(ws, one, snapshot, source=source, secrets=key) for one in specs]
    if not (arrays and many):
        return submit(ws, submissions)
    # A group keeps the limit, and goes to its cluster as one array.
    row = GroupRecord(group, "map", name, ws.user, ws.clock(), at_once)
    return submit_group(ws, [replace(one, group=group, number=index) for index, one in enumerate(submissions)], row)


def _check_limit(at_once: int, time_s: int | None, *, arrays: bool, here: bool, where: str) -> None:
    """Raise `SpecError` for a limit that cannot be kept."""
    if at_once < 1:
        raise SpecError(f"at_once: at least one call runs at a time, not {at_once}", where=where)
    if not arrays and not here:
        raise SpecError("at_once needs a cluster with arrays, or this machine", where=where)
    if not arrays and time_s is not None:
        raise SpecError(
            "a call that waits for its turn on this machine uses up its time limit", where=where,
            hint="Leave out at_once or resources.time.",
        )  # fmt: skip
