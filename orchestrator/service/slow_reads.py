"""Reads that wait for clusters: threads of their own, and a few at a time for each token.

A host that does not answer, or a file of gigabytes, then keeps neither other routes nor other users waiting.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from orc.orchestrator.service.request_rates import too_many

THREADS = 8
AT_ONCE = 4  # of one token
_MOST_WAITING = 64  # of one token
LOOK_S = 5.0  # for which one request reads what a job measures; the next one goes on
_Result = TypeVar("_Result")
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


class SlowReads:
    """Threads for reads that wait for clusters."""

    def __init__(self) -> None:
        self._threads = anyio.CapacityLimiter(THREADS)
        self._limiters: dict[str, anyio.CapacityLimiter] = {}  # of tokens that read now
        self._readers: dict[str, int] = {}

    async def run(self, token_id: str, read: Callable[[], _Result]) -> _Result:
        """Return what *read* returns in a thread. Raises `ApiError` (429) where too many of that token wait already."""
        waiting = self._readers.get(token_id, 0)
        if waiting >= _MOST_WAITING:
            raise too_many(1, "too many requests of this token wait for clusters")
        self._readers[token_id] = waiting + 1
        limiter = self._limiters.setdefault(token_id, anyio.CapacityLimiter(AT_ONCE))
        try:
            async with limiter:
                return await anyio.to_thread.run_sync(read, limiter=self._threads)
        finally:
            self._readers[token_id] -= 1
            if not self._readers[token_id]:
                del self._readers[token_id], self._limiters[token_id]


def asks_clusters(endpoint: _Endpoint) -> _Endpoint:
    """Let a route, which has `service` and `principal`, read among the slow ones."""

    @functools.wraps(endpoint)
    async def run(**values: Any) -> Any:
        read = functools.partial(endpoint, **values)
        return await values["service"].slow_reads.run(values["principal"].token_id, read)

    run.__dict__["__signature__"] = inspect.signature(endpoint, eval_str=True)
    return run  # type: ignore[return-value]
