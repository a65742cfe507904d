"""Following a job to its end: logs as they grow, over retries, with the state on the side."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendUnreachable
from orc.orchestrator.cli.ui import jobtext, reporting

if TYPE_CHECKING:
    from orc.orchestrator.cli.ui.display import Display
    from orc.orchestrator.cli.ui.tail import Cursor, Selection
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.views import JobView

# A pass may take at most this share of the time: fast where asking is cheap (this machine), polite where it is not.
REFRESH_SHARE = 0.1
REFRESH_INTERVAL_S = (0.2, 10.0)


class Watch:
    """Refresh of a job now and then, with one warning when its cluster does not answer."""

    def __init__(self, client: JobsClient, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._due, self._silent = 0.0, False

    def poll(self) -> JobView:
        """Return the job, refreshed when that is due."""
        began = time.monotonic()
        if began >= self._due:
            unreachable = self._client.refresh([self._job_id]).unreachable
            if unreachable and not self._silent:
                reporting.warn_unreachable(unreachable, "the job goes on; still trying")
            self._silent = bool(unreachable)
            low, high = REFRESH_INTERVAL_S
            ended = time.monotonic()
            self._due = ended + min(high, max(low, (ended - began) / REFRESH_SHARE))
        return self._client.job(self._job_id)


def follow(
    client: JobsClient,
    job_id: str,
    cursor: Cursor,
    selection: Selection,
    shown: Display,
    *,
    first_attempt: int = 0,
    only: bool = False,
) -> JobView:
    """Copy logs until the job has ended, or *first_attempt* has if it is the *only* one; returns the last view.

    Without *first_attempt* it begins with the newest.
    """
    watch = Watch(client, job_id)
    current = first_attempt
    while True:
        view = watch.poll()
        newest = len(view.attempts)
        current = current or newest
        moved = False
        # An attempt whose end was seen before its logs were read has been copied completely.
        while 0 < current <= newest:
            final = view.ended or view.attempts[current - 1].ended_at is not None
            moved |= _copy(client, job_id, cursor, current, selection, final=final)
            if current == newest or only:
                break
            shown.note(_boundary(view, current))
            current += 1
        if view.ended or (only and newest >= current and view.attempts[current - 1].ended_at is not None):
            return view
        _show(view, shown)
        if not moved:
            time.sleep(client.log_interval_s)


def _copy(client: JobsClient, job_id: str, cursor: Cursor, attempt: int, selection: Selection, *, final: bool) -> bool:
    try:
        selectors = selection.of(client.log_selectors(job_id, attempt=attempt), final=final)
        return cursor.copy(attempt, selectors) > 0
    except BackendUnreachable:
        return False  # `Watch.poll` has printed it


def _boundary(view: JobView, number: int) -> str:
    """Return the line between the output of an attempt that has ended and that of the next one."""
    ended = view.attempts[number - 1]
    why = jobtext.first_line(ended.reason) or ended.cause or ""
    return f"--- attempt {number} {ended.state}{f': {why}' if why else ''}; attempt {number + 1} ---"


def _show(view: JobView, shown: Display) -> None:
    number = f" attempt {len(view.attempts)}" if len(view.attempts) > 1 else ""
    step, situation = f"{view.id} {view.state}{number}", jobtext.situation(view)
    if view.state == "RUNNING":  # what changes all the time is shown where it can be overwritten
        shown.show(step, situation)
    else:
        shown.show(f"{step}: {situation}")


def conclusion(view: JobView) -> str:
    """Print the end of a job, with the first failure when there is one."""
    lines = [jobtext.headline(view)]
    if view.state == "FAILED" and view.attempts and (verdict := view.attempts[-1].exit) and verdict.first_failure:
        lines += jobtext.failure(verdict.first_failure)
    if view.state == "FAILED":
        lines.append(f"more: orc status {view.id}; orc logs {view.id}")
    return "\n".join(lines)
