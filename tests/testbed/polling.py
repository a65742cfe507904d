"""How often a test looks at what it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator

_LONGEST_REST_S = 2.0


def polls(timeout_s: float, every_s: float = 0.05) -> Iterator[None]:
    """Yield for each look, until *timeout_s* have passed.

    After a look comes a rest of three times its length: most of a busy machine is left to what the test waits for.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(min(max(every_s, 3 * (time.monotonic() - began)), _LONGEST_REST_S))
