"""Log text: the lines that a container prints, split into the logs of ranks and of the node. Pure.

CloudWatch keeps one message per line of the container. A line of a rank begins with ``[rank 3] ``; ``[rank 3~] `` is a
piece of a line that goes on (or has no end). Everything else is the node's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANK = re.compile(r"\[rank (?P<rank>\d+)(?P<piece>~?)\] ?")


def text_of(messages: Iterable[str], *, rank: int | None) -> bytes:
    """Return the output of one rank, or with `None` of the node itself, among *messages*."""
    found = []
    for message in messages:
        for line in message.removesuffix("\n").split("\n"):
            match = _RANK.match(line)
            if rank is None:
                if match is None:
                    found.append(line + "\n")
            elif match is not None and int(match["rank"]) == rank:
                found.append(line[match.end() :] + ("" if match["piece"] else "\n"))
    return "".join(found).encode()
