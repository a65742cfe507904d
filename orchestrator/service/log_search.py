"""Search in logs of any size: a piece at a time, for a bounded time, with a bounded answer."""

from __future__ import annotations

import re
import time
from typing import Any

from orc.orchestrator.client import Client
from orc.orchestrator.service.log_feed import LogKey, read_at

_BYTES = 1 << 20
_SHOWN = 2000  # bytes of a line around what was found
_SECONDS = 5.0  # of one request; the next one goes on


def search_log(
    client: Client, key: LogKey, text: str, *, offset: int, limit: int, ignore_case: bool = False
) -> dict[str, Any]:
    """Return ``{"matches": [{"offset", "text"}], "next"}``: lines with *text* from the byte *offset* on.

    The text is taken literally. A pattern of the caller's could take exponential time.
    """
    pattern = re.compile(re.escape(text.encode("utf-8", "surrogatepass")), re.IGNORECASE if ignore_case else 0)
    until = time.monotonic() + _SECONDS
    matches: list[dict[str, Any]] = []
    begin, rest = offset, b""  # *begin* is the position of rest[0]
    while data := read_at(client, key, begin + len(rest), _BYTES):
        rest += data
        whole = rest.rfind(b"\n") + 1
        if not whole and len(rest) < _BYTES:
            continue  # the rest of the line comes with the next piece
        # A line without an end is looked through in parts that overlap by what a match can be cut to.
        whole = whole or len(rest) - len(text.encode("utf-8", "surrogatepass")) + 1
        if (following := _look(rest[:whole], begin, pattern, matches, limit)) is not None:
            return {"matches": matches, "next": following}
        begin, rest = begin + whole, rest[whole:]
        if time.monotonic() > until:
            return {"matches": matches, "next": begin}
    following = _look(rest, begin, pattern, matches, limit)
    return {"matches": matches, "next": following}


def _look(data: bytes, begin: int, pattern: re.Pattern[bytes], matches: list[dict[str, Any]], limit: int) -> int | None:
    """Add the lines of *data* that match; return where the next would begin when there are *limit*."""
    position = 0
    while found := pattern.search(data, position):
        start = data.rfind(b"\n", 0, found.start()) + 1
        end = data.find(b"\n", found.end())
        end = len(data) if end < 0 else end
        shown = data[max(start, found.start() - _SHOWN // 2) : min(end, found.start() + _SHOWN)]
        matches.append({"offset": begin + start, "text": shown.decode("utf-8", "replace")})
        position = min(end + 1, len(data))
        if len(matches) >= limit:
            return begin + position
        if position >= len(data):
            return None
    return None
