"""Saving on rank 0 alone, while the others train on: every process has the whole of what is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError, RanksElsewhere
from orc.runtime.checkpoint.replication.barrier import Barrier, Verdict
from orc.runtime.checkpoint.replication.sites import Survey
from orc.runtime.checkpoint.state.base import steps_parts
from orc.runtime.core.prepared import Layout
from orc.runtime.parallel.records import records_of

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared


class BarrierAlone(Barrier):
    """The barriers of a save that rank 0 makes by itself: it agrees with itself and writes nothing on the store."""

    def hold(self, what: str, value: Any, verdict: Verdict, **options: Any) -> Any:
        """Return the *verdict* about *value*."""
        return verdict([value])

    def part(self, timeout_s: float = 10.0) -> None:
        """Return at once: no other rank takes part."""


def survey_alone(context: RunContext, barrier: Barrier) -> Survey:
    """Return one that looks at no other machine: where they share no directory, they get a copy when they load."""
    return Survey(context, barrier, "1")


def check_savable_alone(prepared: Prepared, elsewhere: RanksElsewhere) -> None:
    """Refuse what rank 0 does not have whole.

    Raises:
        CheckpointError: a model or optimizer is spread over the ranks.
    """
    models, optimizers = records_of(prepared), prepared.optimizers
    spread = [type(model.model).__name__ for model in models if model.layout is not Layout.WHOLE]
    spread += [type(optimizer).__name__ for optimizer in optimizers if steps_parts(optimizer, models)]
    spread += [
        type(inner).__name__
        for optimizer in optimizers
        if hasattr(inner := getattr(optimizer, "optimizer", optimizer), "consolidate_state_dict")
    ]
    if spread:
        raise CheckpointError(
            f"save_state: rank 0 cannot save alone, each rank holds a part of {', '.join(dict.fromkeys(spread))}, and "
            f"{elsewhere}. Call save_state on every rank: take it out of `if accelerator.is_main_process`"
        )
