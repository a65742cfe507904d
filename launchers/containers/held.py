"""Files that only the containers of an attempt hold, read in them while they run.

Afterwards there is what the platform keeps: their output, and the last words of each (`program.report_of`).
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from orc.launchers.agent.records import RECORD_BYTES, parse_object
from orc.launchers.containers.http import ApiRefusal
from orc.launchers.containers.output import text_of
from orc.launchers.containers.transport import Channel, ContainerTransport, wait_for
from orc.launchers.errors import BackendError, BackendUnreachable

ENDING_S = 5.0  # until the platform knows that a container has ended
CANCEL = "cancel.json"
KEPT = ("agent.json", CANCEL, "ended.json")
_LOG = re.compile(r"logs/(rank|node)-([0-9]+)\.log")


class NothingRuns(BackendUnreachable):
    """No container has the files now."""


class HeldFiles(ContainerTransport):
    """The files of one attempt, at *home* in each of its containers; the first one has all records."""

    def __init__(self, home: str, python: str) -> None:
        super().__init__("its containers", python)
        self.home = home
        self.unread = ""  # why records are missing of a container that runs, once that is so
        self._log = ("", b"")  # path and content of the log that was read last: it is read piece by piece

    @abc.abstractmethod
    def kept(self) -> Mapping[str, bytes]:
        """Return those of `KEPT` that there are."""

    @abc.abstractmethod
    def keep(self, name: str, data: bytes) -> None:
        """Keep one of them for as long as the attempt is known to the platform."""

    @abc.abstractmethod
    def last_words(self) -> Mapping[int, str]:
        """Return what containers that have ended have left, by their nodes."""

    @abc.abstractmethod
    def output(self, node: int) -> str | None:
        """Return what the container of a node has printed; `None` where there is none."""

    @abc.abstractmethod
    def first(self, command: Sequence[str]) -> Channel | None:
        """Start a command in the first container; `None` when it does not run."""

    def channel(self, command: Sequence[str]) -> Channel:
        """See `ContainerTransport.channel`. Raises `NothingRuns`."""
        if (found := self.first(command)) is None:
            raise NothingRuns("the first container does not run", where=self.home)
        return found

    def close(self) -> None:
        """See `Transport.close`."""

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Transport.write`."""
        if (name := path.removeprefix(f"{self.home}/")) not in KEPT:
            super().write(path, data, mode=mode)
            return
        self.keep(name, data)
        if name == CANCEL:  # who ended an attempt otherwise asks nothing of its containers, which may not answer
            with suppress(NothingRuns):
                super().write(path, data, mode=mode)

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See `Transport.read`."""
        if (log := _LOG.fullmatch(path.removeprefix(f"{self.home}/"))) is None:
            try:
                return super().read(path, offset=offset, limit=limit)
            except NothingRuns:
                raise FileNotFoundError(path) from None
        end = None if limit is None else offset + limit
        if end is None or self._log[0] != path or len(self._log[1]) < end:
            number, rank = int(log[2]), log[1] == "rank"
            text = self.output(number // self._nproc() if rank else number) or ""
            self._log = (path, text_of([text], rank=number if rank else None) if text else b"")
        return self._log[1][offset:end]

    def read_many(self, paths: Iterable[str], *, limit: int = RECORD_BYTES) -> dict[str, bytes]:
        """See `Transport.read_many`."""
        wanted, found, why = list(paths), dict[str, bytes](), ""

        def read() -> bool:
            nonlocal why
            known = self._known()
            found.update({path: known[path] for path in wanted if path in known})
            try:
                found.update(ContainerTransport.read_many(self, [p for p in wanted if p not in known], limit=limit))
            except NothingRuns:
                return True
            except ApiRefusal:
                raise
            except BackendError as error:
                why = error.what
                return False  # it may be ending at this moment: soon there is what it leaves
            return True

        if not wait_for(read, ENDING_S):
            self.unread = why
        return found

    def _known(self) -> dict[str, bytes]:
        """Return what there is without a container, by its path."""
        known = {f"{self.home}/{name}": data for name, data in self.kept().items()}
        for node, words in self.last_words().items():
            for name, record in (parse_object(words.encode()) or {}).items():
                known[f"{self.home}/node-{node}/{name}.json"] = json.dumps(record).encode()
        return known

    def names(self, path: str) -> list[str]:
        """See `Transport.names`."""
        if path != f"{self.home}/logs":
            with suppress(NothingRuns):
                return super().names(path)
            return []
        nproc, config = self._nproc(), parse_object(self.kept().get("agent.json", b"{}")) or {}
        nodes = [node for node in range(int(config.get("nnodes", 0))) if self.output(node)]
        ranks = [f"rank-{node * nproc + local}.log" for node in nodes for local in range(nproc)]
        return sorted([*ranks, *(f"node-{node}.log" for node in nodes)])

    def _nproc(self) -> int:
        return int((parse_object(self.kept().get("agent.json", b"{}")) or {}).get("nproc", 1))
