"""Following a log with any client: it is read on until its attempt has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.backends.base import LogChunk, LogSelector
    from orc.orchestrator.clients.protocol import JobsClient


def follow_log(
    client: JobsClient,
    sleep: Callable[[float], None],
    job_id: str,
    selector: LogSelector,
    attempt: int | None,
    offset: int,
) -> Iterator[LogChunk]:
    """Yield the pieces of a log of any client as they are written, until the attempt has ended.

    Without *attempt* it is the newest one when this begins.
    """
    while True:
        view = client.job(job_id)
        number = attempt or len(view.attempts)
        # An attempt whose end was seen before its log was read has been read completely.
        ended = view.ended or (0 < number <= len(view.attempts) and view.attempts[number - 1].ended_at is not None)
        if number:
            attempt = number
            for chunk in client.read_log(job_id, selector, number, offset):
                yield chunk
                offset = chunk.end
        if ended:
            return
        sleep(client.log_interval_s)
        client.refresh([job_id])
