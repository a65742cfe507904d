"""The output of containers, written and read back: a line of rank 3 begins with ``[rank 3] ``.

Platforms keep what a container prints as one stream of lines, so the lines say whose they are. ``[rank 3~] `` is a
piece of a line that goes on (or has no end); other lines are the node's own. Standard library only, Python >= 3.9: this
is on both sides.
"""

from __future__ import annotations

import codecs
import os
import re
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PIECE_BYTES = 16384  # of a line that does not end
PATIENCE_S = 1.0  # for the rest of a line
READ_BYTES = 1 << 20

_RANK_LOG = re.compile(r"rank-([0-9]+)\.log")
_LINE_OF_RANK = re.compile(r"\[rank (?P<rank>\d+)(?P<piece>~?)\] ?")


def text_of(messages: Iterable[str], *, rank: int | None) -> bytes:
    """Return the output of one rank, or with `None` of the node itself, among the lines of *messages*."""
    found = []
    for message in messages:
        for line in message.removesuffix("\n").split("\n"):
            match = _LINE_OF_RANK.match(line)
            if rank is None:
                if match is None:
                    found.append(line + "\n")
            elif match is not None and int(match["rank"]) == rank:
                found.append(line[match.end() :] + ("" if match["piece"] else "\n"))
    return "".join(found).encode()


class Tail:
    """Log file on its way to standard output: lines of a rank get ``[rank 3] `` in front, a node's own do not.

    A piece of a line that is not finished yet is marked ``[rank 3~] ``: the rest follows on the next line.
    """

    def __init__(self, path: str, rank: int | None) -> None:
        self.path = path
        self.rank = rank
        self.offset = 0
        self.held = ""
        self.held_since = 0.0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, final: bool = False) -> list[str]:
        """The lines that can be shown now, each with its newline."""
        lines: list[str] = []
        while data := self.piece():
            lines += self.take(self.decoder.decode(data))
        return lines + self.take(self.decoder.decode(b"", final), final)

    def piece(self) -> bytes:
        """Return the next piece of the file; empty at its end."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(READ_BYTES)
        self.offset += len(data)
        return data

    def take(self, text: str, final: bool = False) -> list[str]:
        """Turn new *text* into lines; *final*: nothing follows."""
        now = time.monotonic()
        if not self.held and text:
            self.held_since = now
        *whole, rest = (self.held + text).split("\n")
        lines: list[str] = []
        for line in whole:
            while len(line) > PIECE_BYTES:
                lines.append(self.line(line[:PIECE_BYTES], more=True))
                line = line[PIECE_BYTES:]
            lines.append(self.line(line))
        while len(rest) > PIECE_BYTES:
            lines.append(self.line(rest[:PIECE_BYTES], more=True))
            rest = rest[PIECE_BYTES:]
        if whole:
            self.held_since = now
        if rest and (final or now - self.held_since > PATIENCE_S):
            lines.append(self.line(rest, more=True))
            rest = ""
        self.held = rest
        return lines

    def line(self, text: str, more: bool = False) -> str:
        """Return one line of output."""
        if self.rank is not None:
            return f"[rank {self.rank}{'~' if more else ''}] {text}\n"
        return f" {text}\n" if _LINE_OF_RANK.match(text) else f"{text}\n"


class Logs:
    """The logs of this host's agent and ranks."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.tails: dict[str, Tail] = {}

    def show(self, final: bool = False) -> None:
        """Print what is new."""
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return
        for name in names:
            if name not in self.tails and name.endswith(".log"):
                found = _RANK_LOG.fullmatch(name)
                self.tails[name] = Tail(os.path.join(self.directory, name), int(found[1]) if found else None)
        for tail in self.tails.values():
            log_line("".join(tail.read(final)))


def log_line(text: str) -> None:
    """Onto standard output, whole."""
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(1, data) :]
