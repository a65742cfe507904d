"""Names and pieces of an attempt's logs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogSelector:
    """Selector of one log of an attempt: a rank's, what a node's agent and launcher print, or what starts the
    agents prints.
    """

    rank: int | None = None
    node: int | None = None
    launcher: bool = False

    def __post_init__(self) -> None:
        if (self.rank is not None) + (self.node is not None) + self.launcher != 1:
            raise ValueError("a log selector names a rank, a node or the launcher")


@dataclass(frozen=True)
class LogChunk:
    """A piece of one log. ``offset`` is the byte position of ``data[0]``; the next read starts at `end`."""

    selector: LogSelector
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Return where the next chunk starts, in bytes."""
        return self.offset + len(self.data)
