"""Rates of requests: how many a token and an address may send. Counted in this process alone."""

from __future__ import annotations

import math
import time

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
