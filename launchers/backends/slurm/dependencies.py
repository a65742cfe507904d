"""Options of ``sbatch --dependency`` for an attempt that waits for others. Pure.

Slurm starts a job at once whose dependency it does not know (any more), so what has ended is judged here and left out,
and what cannot be judged is not sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from orc.launchers.backends.base import Dependency, Handle, Observation, Phase
from orc.launchers.backends.slurm.arrays import script_of
from orc.launchers.errors import BackendError, BackendUnreachable

if TYPE_CHECKING:
    from orc.launchers.plan import Plan

_CONDITIONS = {"succeeded": "afterok", "failed": "afternotok", "ended": "afterany"}


def dependency_options(
    plan: Plan, after: Sequence[Dependency], seen: Mapping[Handle, Observation], known: Collection[Handle]
) -> list[str]:
    """Return the dependency options for *plan*, which may have a dependency of its own.

    *seen* is what became of the attempts, *known* are those that the controller knows by their number. Raises
    `BackendError` for a dependency that can never be met, `BackendUnreachable` for one that cannot be judged now.
    """
    clauses = []
    for one in after:
        if one.handle.cluster != plan.cluster:
            raise BackendError(
                f"{one.handle.marker} is on another cluster ({one.handle.cluster})",
                where=plan.marker,
                hint="Slurm knows its own jobs only; wait for it with `orc wait`.",
            )
        met = _met(one, seen[one.handle])
        if met is None and one.handle in known:
            clauses.append(f"{_CONDITIONS[one.condition]}:{one.handle.native_id}")
        elif met is None:
            raise BackendUnreachable(f"the state of {one.handle.marker} is unknown", where=plan.marker)
        elif not met:
            what = f"{plan.marker} waits for {one.handle.marker} to have {one.condition}, and it is "
            raise BackendError(f"{what}{seen[one.handle].phase} ({seen[one.handle].reason})", where=plan.marker)
    if not clauses:
        return []
    own = next((line for line in script_of(plan).splitlines() if line.startswith("#SBATCH --dependency=")), "")
    given = own.removeprefix("#SBATCH --dependency=").strip('"')
    if "?" in given:  # any of several: Slurm has no brackets
        raise BackendError(
            f"the job's own dependency ({given}) cannot be joined with others",
            where=plan.marker,
            hint="Write it with commas (all of them), or remove it.",
        )
    return [f"--dependency={','.join(filter(None, (given, *clauses)))}", "--kill-on-invalid-dep=yes"]


def _met(one: Dependency, seen: Observation) -> bool | None:
    """Return whether the dependency is met; `None` while that is open."""
    if not seen.phase.ended:
        return None
    succeeded = seen.phase is Phase.SUCCEEDED
    return {"succeeded": succeeded, "failed": not succeeded, "ended": True}[one.condition]
