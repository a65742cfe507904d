"""Logs of attempts from CloudWatch: which there are, and what each holds from a byte position on.

CloudWatch keeps one message per line of the container; `containers.output` says whose line it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orc.launchers.backends.base import LogSelector
from orc.launchers.containers.output import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orc.launchers.backends.sagemaker.aws import AwsService


@dataclass
class Cursor:
    """Position in one log: a token for each stream, and the number of bytes read so far."""

    tokens: dict[str, str | None] = field(default_factory=dict)
    end: int = 0


class Logs:
    """Reads logs, and remembers where it was, so that following one does not read it from the start each time."""

    def __init__(self, service: AwsService) -> None:
        self._service = service
        self._cursors: dict[tuple[str, LogSelector], Cursor] = {}
        self._nodes: dict[tuple[str, int], int] = {}  # job, rank -> the node that runs it

    def selectors(self, name: str, nnodes: int, nproc: int) -> list[LogSelector]:
        """Return the logs that have content so far: ranks in order, then nodes."""
        nodes = sorted({_node_of(stream) for stream in self._service.streams(name)} & set(range(nnodes)))
        ranks = [LogSelector(rank=node * nproc + local) for node in nodes for local in range(nproc)]
        return [*ranks, *(LogSelector(node=node) for node in nodes)]

    def read(self, name: str, selector: LogSelector, offset: int, *, nproc: int) -> Iterator[bytes]:
        """The log from byte *offset* on, in the pieces that CloudWatch has it in."""
        streams = self._service.streams(name)
        nodes = [selector.node] if selector.node is not None else self._candidates(name, selector, streams, nproc)
        for node in nodes:
            own = [stream for stream in streams if _node_of(stream) == node]
            found = False
            for data in self._read(name, selector, own, offset):
                found = True
                yield data
            cursor = self._cursors.get((name, selector))
            if selector.rank is None:
                return
            if found or (cursor is not None and cursor.end):
                self._nodes[(name, selector.rank)] = node
                return

    def _candidates(self, name: str, selector: LogSelector, streams: Sequence[str], nproc: int) -> list[int]:
        """Nodes that may run the rank, the likeliest first: launchers may number ranks in their own way."""
        assert selector.rank is not None
        if (name, selector.rank) in self._nodes:
            return [self._nodes[(name, selector.rank)]]
        likely = selector.rank // max(nproc, 1)
        there = {_node_of(stream) for stream in streams}
        return sorted(there, key=lambda node: (node != likely, node))

    def _read(self, name: str, selector: LogSelector, streams: Sequence[str], offset: int) -> Iterator[bytes]:
        key = (name, selector)
        cursor = self._cursors.get(key)
        if cursor is None or cursor.end != offset or not cursor.tokens.keys() <= set(streams):
            cursor = Cursor()
        self._cursors[key] = cursor
        for stream in streams:  # a job that was interrupted goes on in new ones
            token = cursor.tokens.get(stream)
            while True:
                messages, following = self._service.events(stream, token)
                data = text_of(messages, rank=selector.rank)
                start, cursor.end = cursor.end, cursor.end + len(data)
                cursor.tokens[stream] = following
                if cursor.end > offset:
                    yield data[max(0, offset - start) :]
                if not messages and following == token:  # CloudWatch gives empty pages in between too
                    break
                token = following


def _node_of(stream: str) -> int:
    """``<job>/algo-2-1712345678`` is node 1; -1 for what is no host's stream."""
    words = stream.rpartition("/")[2].split("-")
    return int(words[1]) - 1 if len(words) > 1 and words[0] == "algo" and words[1].isdigit() else -1
