"""Methods of `Client` for Python functions (docs/how-to/python-functions.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from orc.launchers.errors import LaunchError, SpecError

if TYPE_CHECKING:
    from orc.orchestrator.client import Client
    from orc.orchestrator.functions.jobs import Call, FunctionJob

R = TypeVar("R")


class FunctionCalls:
    """Methods of `Client` for functions."""

    @property
    def _client(self) -> Client:
        return cast("Client", self)

    def submit_function(
        self,
        fn: Callable[..., R],
        /,
        *args: Any,
        cluster: str = "local",
        resources: Mapping[str, Any] | None = None,
        name: str | None = None,
        max_timeouts: int = 3,
        job: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> FunctionJob[R]:
        """Submit a job that calls ``fn(*args, **kwargs)`` on a cluster.

        A function that has a ``checkpoint`` method saves before its time limit and when it is preempted; what that
        method returns is called next.

        Args:
            fn: What to call; pickled, with its arguments.
            *args: Its positional arguments.
            cluster: A name in clusters.yaml.
            resources: The section of that name of a job file.
            name: Name of the job; that of the function by default.
            max_timeouts: Number of time limits after which a function that saves goes on.
            job: Other keys of a job file: ``env``, ``secrets``, ``setup``, ``environment``, ``retry``, ``grace``, ...
            **kwargs: Keyword arguments of the function.

        Returns:
            The job, whose `FunctionJob.result` is the function's value.

        Raises:
            LaunchError: The call cannot be pickled, the job's specification is wrong, or the cluster rejects it.
        """
        (made,) = self.submit_calls(
            [(fn, args, kwargs)], cluster=cluster, resources=resources, name=name, max_timeouts=max_timeouts, job=job
        )
        return made

    def map_functions(
        self,
        fn: Callable[..., R],
        /,
        *iterables: Iterable[Any],
        cluster: str = "local",
        resources: Mapping[str, Any] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        max_timeouts: int = 3,
        job: Mapping[str, Any] | None = None,
    ) -> list[FunctionJob[R]]:
        """Submit a job for each call of ``map(fn, *iterables)``; where the cluster has arrays, as one array.

        Args:
            fn: What to call.
            *iterables: Its arguments, as those of `map`, but of the same length.
            cluster: A name in clusters.yaml.
            resources: What one call needs.
            name: Name of the jobs.
            at_once: Number of calls that run at a time, on this machine and on clusters with arrays.
            max_timeouts: As of `submit_function`.
            job: As of `submit_function`.

        Returns:
            The jobs, in the order of the arguments.

        Raises:
            LaunchError: As of `submit_function`.
        """
        from orc.orchestrator.functions.jobs import arguments

        calls: list[Call] = [(fn, args, {}) for args in arguments(iterables)]
        return self.submit_calls(
            calls, many=True, cluster=cluster, resources=resources, name=name, at_once=at_once,
            max_timeouts=max_timeouts, job=job,
        )  # fmt: skip

    def submit_calls(
        self,
        calls: Sequence[Call],
        *,
        many: bool = False,
        cluster: str = "local",
        resources: Mapping[str, Any] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        max_timeouts: int = 3,
        job: Mapping[str, Any] | None = None,
    ) -> list[FunctionJob[Any]]:
        """Submit a job for each of *calls*, ``(function, args, kwargs)``; *many* are a map. See `map_functions`."""
        from orc.launchers.backends.base import SupportsArrays
        from orc.launchers.ids import new_job_id
        from orc.launchers.spec.load import LoadedJob
        from orc.orchestrator.engine import snapshots, submission
        from orc.orchestrator.engine.array_submission import start_array
        from orc.orchestrator.functions import jobs as functions
        from orc.orchestrator.functions.keys import new_key

        client = self._client
        ws = client.workspace
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
        snapshot = snapshots.with_code(ws.store, LoadedJob(spec, Path(), Path.cwd()), code, backend, submission.silent)
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
        if arrays and len(specs) > 1:
            records = start_array(ws, specs, snapshot, source=source, at_once=at_once, given=key)
        else:
            records = [submission.start(ws, one, snapshot, source=source, given=key) for one in specs]
        return [functions.FunctionJob(client, record.id) for record in records]

    def function_jobs(self, id: str, *, cluster: str = "") -> list[FunctionJob[Any]]:
        """Return the calls that were submitted earlier, perhaps by another process.

        Args:
            id: The id of a job, or of a map (the tag ``map`` of its jobs), or ``<map>.<number>`` for one of its calls.
            cluster: Not needed: the ledger has the cluster of each job.

        Raises:
            LaunchError: There is no such job.
        """
        from orc.orchestrator.functions.jobs import CALL_TAG, MAP_TAG, FunctionJob

        group, _, number = id.partition(".")
        rows = self._client.jobs(tags={MAP_TAG: group}, limit=None)
        calls = sorted((int(row.tags[CALL_TAG]), row.id) for row in rows)
        found = [job for call, job in calls if not number or str(call) == number]
        if not calls:
            found = [self._client.job(id).id]
        elif not found:
            raise LaunchError(f"{group} has no call {number}", hint=f"it has {len(calls)}, from 0")
        return [FunctionJob(self._client, job) for job in found]


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
