"""Provision of a TPU, in one zone after the other; resources of the same name that are others' are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orc.launchers.backends.tpu import lifecycle, request
from orc.launchers.backends.tpu.lifecycle import ZoneStatus
from orc.launchers.backends.tpu.request import TpuLocation
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.backends.tpu.local_state import LocalState
    from orc.launchers.plan import Plan


def request_tpu(api: TpuApi, local: LocalState, plan: Plan, zones: Sequence[str]) -> list[ZoneStatus]:
    """Request the TPU in *zones* until one accepts; return the statuses of those that did not.

    Each zone is noted before it is asked: where this is cut off, the TPU is looked for there.
    """
    from orc.launchers.backends.tpu.client import AlreadyExists, ApiRejected, ResourceExhausted
    from orc.launchers.backends.tpu.listing import list_resources

    location = TpuLocation.parse(request.read_requests(plan)["place"])
    requests = {item["parent"].rpartition("/")[2]: item for item in request.read_requests(plan)["requests"]}
    rejections: list[ZoneStatus] = []
    for zone in zones:
        local.zone = zone
        try:
            api.create(requests[zone])
        except AlreadyExists:
            there = replace(location, zones=(zone,))
            require_own(list_resources(api, [there]).statuses(there), plan.marker)
        except ResourceExhausted as error:
            rejections.append(lifecycle.zone_rejected(zone, "RESOURCE_EXHAUSTED", error.what))
            continue
        except ApiRejected as error:
            rejections.append(lifecycle.zone_rejected(zone, error.code, error.what))
            continue
        except BackendUnreachable as error:
            raise AmbiguousSubmit(f"the request was cut off: {error.what}", where=error.where) from error
        break
    return rejections


def require_own(statuses: Sequence[ZoneStatus], marker: str) -> None:
    """Raise `BackendError` when the name of the attempt's TPU is taken by another."""
    for status in statuses:
        owner = status.queued or status.node
        if owner is not None and status.labels.get(request.MARKER) != request.tpu_id(marker):
            raise BackendError(
                f"{owner.name} exists, and is not of this attempt: it lacks the label {request.MARKER}",
                where=marker,
                hint="Delete it, and submit the job again.",
            )
