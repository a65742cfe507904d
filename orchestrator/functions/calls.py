"""The client's part for Python functions; what it does is in `functions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.functions.jobs import FunctionJob
    from orc.orchestrator.workspace import Workspace

R = TypeVar("R")


class FunctionCalls:
    """Calls of functions on clusters."""

    workspace: Workspace

    def _cluster(self, name: str) -> Cluster:
        raise NotImplementedError

    def submit_function(
        self,
        fn: Callable[..., R],
        /,
        *args: Any,
        cluster: str = "local",
        resources: Mapping[str, Any] | None = None,
        name: str | None = None,
        max_timeouts: int = 3,
        **kwargs: Any,
    ) -> FunctionJob[R]:
        """Call ``fn(*args, **kwargs)`` on a cluster of kind local or slurm, through submitit.

        *resources* is the section of that name of a job file. A function that has a ``checkpoint`` method is asked to
        save before its time limit, and goes on in the same job, *max_timeouts* times at most
        (docs/how-to/python-functions.md).
        """
        from orc.orchestrator.functions import jobs as functions

        (job,) = functions.submit(
            self._cluster(cluster), self.workspace.state_dir, fn, [(args, kwargs)],
            many=False, resources=resources, name=name, at_once=None, max_timeouts=max_timeouts,
        )  # fmt: skip
        return job

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
    ) -> list[FunctionJob[R]]:
        """``map(fn, *iterables)`` on a cluster, as one array, *at_once* calls at a time.

        *resources* are those of one call; everything else is as in `submit_function`.
        """
        from orc.orchestrator.functions import jobs as functions

        return functions.submit(
            self._cluster(cluster), self.workspace.state_dir, fn, functions.arguments(iterables),
            many=True, resources=resources, name=name, at_once=at_once, max_timeouts=max_timeouts,
        )  # fmt: skip

    def function_jobs(self, id: str, *, cluster: str = "local") -> list[FunctionJob[Any]]:
        """The calls that were submitted under *id* earlier, perhaps by another process: one, or those of a map."""
        from orc.orchestrator.functions import jobs as functions

        return functions.load(self._cluster(cluster), self.workspace.state_dir, id)
