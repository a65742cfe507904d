"""Teardown after the end of an attempt: fetch its logs, then delete or keep its TPU.

The end is reported when that is done, because an attempt is not polled again afterwards. Failures are reported, and
tried with every pass; at last the end is reported nevertheless, with what is left to do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orc.launchers.backends.base import Observation, Phase
from orc.launchers.backends.tpu import lifecycle, request
from orc.launchers.backends.tpu.lifecycle import State, ZoneStatus
from orc.launchers.backends.tpu.listing import list_resources
from orc.launchers.backends.tpu.request import TpuLocation
from orc.launchers.errors import BackendError, LaunchError

if TYPE_CHECKING:
    from orc.launchers.backends.base import Handle
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.backends.tpu.local_state import LocalState
    from orc.launchers.backends.tpu.pods import Pods


@dataclass(frozen=True)
class Teardown:
    """Teardown of the TPUs of one cluster."""

    cluster: str
    delete_timeout_s: float  # after which an end is reported with what is left to do
    api: TpuApi
    pods: Pods

    def settle(self, local: LocalState, handle: Handle) -> Observation:
        """Return the attempt's end once its teardown is done; until then `Phase.UNKNOWN` with the reason."""
        location = TpuLocation.parse(handle.native_id)
        statuses = list_resources(self.api, [location]).statuses(location)
        recorded = local.end()
        assert recorded is not None
        end, at = recorded
        if not location.is_made_for(handle.marker):
            return end
        up = next((status for status in statuses if status.state is State.READY and status.node is not None), None)
        if up is not None and up.node is not None and local.started:
            try:
                trouble = local.fetch_logs(self.pods.on(up.node).hosts, handle.hosts, at)
            except LaunchError as error:
                trouble = error.what
            if trouble and time.time() - at < self.delete_timeout_s:
                return _not_yet(end, f"fetching the logs: {trouble}")
        policy = up.labels.get(request.ON_FINISH, "delete") if up is not None and local.started else "delete"
        if policy == "delete":
            return self._deleted(end, at, location, statuses)
        if policy == "idle" and up is not None:
            return self._idle(end, at, up)
        return end

    def _deleted(self, end: Observation, at: float, location: TpuLocation, statuses: list[ZoneStatus]) -> Observation:
        names = lifecycle.to_delete(statuses, location)
        if not names:
            return end
        rejections = []
        for name in names:
            try:
                self.api.delete(name)
            except BackendError as error:
                rejections.append(f"{name}: {error.what}")
        left = lifecycle.to_delete(list_resources(self.api, [location]).statuses(location), location)
        if not left:
            return end
        return self._late(end, at, f"deleting its TPU: {'; '.join(rejections) or f'{left[0]} is still there'}")

    def _idle(self, end: Observation, at: float, up: ZoneStatus) -> Observation:
        """Label the TPU with the start of its idle time."""
        if request.IDLE_SINCE in up.labels or up.node is None:
            return end
        try:
            self.api.label(up.node, {**up.node.labels, request.IDLE_SINCE: f"{at:.0f}"})
        except BackendError as error:
            return self._late(end, at, f"labelling its TPU as idle: {error.what}")
        return end

    def _late(self, end: Observation, at: float, trouble: str) -> Observation:
        if time.time() - at < self.delete_timeout_s:
            return _not_yet(end, trouble)
        undone = f"NOT DONE: {trouble}; see `orc prune --cluster {self.cluster}`"
        return replace(end, reason="; ".join(filter(None, [end.reason, undone])))


def _not_yet(end: Observation, trouble: str) -> Observation:
    how = end.reason or str(end.phase)
    return Observation(Phase.UNKNOWN, reason=f"over ({how}); {trouble}")
