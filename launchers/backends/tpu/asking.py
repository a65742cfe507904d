"""Asking for a TPU, in one zone after the other; what carries our name and is not ours is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orc.launchers.backends.tpu import lifecycle, request
from orc.launchers.backends.tpu.lifecycle import Sight
from orc.launchers.backends.tpu.request import Place
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.backends.tpu.sights import Board
    from orc.launchers.plan import Plan


def ask(api: TpuApi, plan: Plan, zones: Sequence[str]) -> list[Sight]:
    """Ask in *zones* until one takes the request; the answers of those that did not."""
    from orc.launchers.backends.tpu.client import Exists, NoCapacity, Refused
    from orc.launchers.backends.tpu.sights import look

    place = Place.parse(request.in_plan(plan)["place"])
    requests = {item["parent"].rpartition("/")[2]: item for item in request.in_plan(plan)["requests"]}
    refusals: list[Sight] = []
    for zone in zones:
        try:
            api.create(requests[zone])
        except Exists:
            own_sights(look(api, [place]), place, plan.marker)
        except NoCapacity as error:
            refusals.append(lifecycle.refused(zone, "RESOURCE_EXHAUSTED", error.what))
            continue
        except Refused as error:
            refusals.append(lifecycle.refused(zone, error.code, error.what))
            continue
        except BackendUnreachable as error:
            raise AmbiguousSubmit(f"the request was cut off: {error.what}", where=error.where) from error
        break
    return refusals


def own_sights(board: Board, place: Place, marker: str) -> list[Sight]:
    """The sights of an attempt's own TPU. Raises `BackendError` when somebody else's has its name."""
    sights = board.sights(place)
    for sight in sights:
        owner = sight.queued or sight.node
        if owner is not None and sight.labels.get(request.MARKER) != request.tpu_id(marker):
            raise BackendError(
                f"{owner.name} exists, and is not of this attempt: it lacks the label {request.MARKER}",
                where=marker,
                hint="Delete it, and submit the job again.",
            )
    return sights
