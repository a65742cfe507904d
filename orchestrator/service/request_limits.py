"""Limits of requests: how many a token and an address may send, and how many of a token wait for clusters at a time.

Reads that wait for clusters have threads of their own: a host that does not answer, or a file of gigabytes, then keeps
neither other routes nor other users waiting. All is counted in this process alone.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import anyio.to_thread
from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from orc.orchestrator.service.errors import ApiError


class RequestRates:
    """Rate limits of one service process: moving windows of a minute."""

    def __init__(self, per_minute: int, failed_per_minute: int) -> None:
        self._limiter = MovingWindowRateLimiter(MemoryStorage())
        self._requests = RateLimitItemPerMinute(per_minute)
        self._failures = RateLimitItemPerMinute(failed_per_minute)

    def retry_after(self, kind: str, name: str) -> int | None:
        """Count a request of *name* (an ``address`` or a ``token``); seconds to wait when it is one too many."""
        return None if self._limiter.hit(self._requests, kind, name) else self._wait(self._requests, kind, name)

    def refuse_guessing(self, address: str) -> None:
        """Count a refused token. Raises `ApiError` (429) for an address from which too many of them came."""
        if not self._limiter.hit(self._failures, "failed", address):
            raise too_many(self._wait(self._failures, "failed", address), "too many refused tokens from this address")

    def _wait(self, item: RateLimitItem, *names: str) -> int:
        reset = self._limiter.get_window_stats(item, *names).reset_time
        return max(1, math.ceil(reset - time.time()))


def too_many(seconds: int, what: str = "too many requests") -> ApiError:
    """Return the error for a request that comes too soon."""
    return ApiError(429, what, hint=f"try again in {seconds} s", headers={"Retry-After": str(seconds)})


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
