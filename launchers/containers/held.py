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
from orc.launchers.containers.output import text_of
from orc.launchers.containers.transport import Channel, ContainerTransport
from orc.launchers.errors import BackendUnreachable

KEPT = ("agent.json", "cancel.json", "ended.json")
_LOG = re.compile(r"logs/(rank|node)-([0-9]+)\.log")


class HeldFiles(ContainerTransport):
    """The files of one attempt, at *home* in each of its containers; the first one has all records."""

    def __init__(self, home: str, python: str) -> None:
        super().__init__("its containers", python)
        self.home = home

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
        """See `ContainerTransport.channel`. Raises `FileNotFoundError` when nothing runs."""
        if (found := self.first(command)) is None:
            raise FileNotFoundError("no container has it now")
        return found

    def close(self) -> None:
        """See `Transport.close`."""

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Transport.write`."""
        if (name := path.removeprefix(f"{self.home}/")) in KEPT:
            self.keep(name, data)
        if name != "ended.json":
            with suppress(FileNotFoundError):
                super().write(path, data, mode=mode)

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See `Transport.read`."""
        if (log := _LOG.fullmatch(path.removeprefix(f"{self.home}/"))) is None:
            return super().read(path, offset=offset, limit=limit)
        number, rank = int(log[2]), log[1] == "rank"
        text = self.output(number // self._nproc() if rank else number) or ""
        data = text_of([text], rank=number if rank else None) if text else b""
        return data[offset:] if limit is None else data[offset : offset + limit]

    def read_many(self, paths: Iterable[str], *, limit: int = RECORD_BYTES) -> dict[str, bytes]:
        """See `Transport.read_many`."""
        known = {f"{self.home}/{name}": data for name, data in self.kept().items()}
        for node, words in self.last_words().items():
            for name, record in (parse_object(words.encode()) or {}).items():
                known[f"{self.home}/node-{node}/{name}.json"] = json.dumps(record).encode()
        wanted = list(paths)
        found = {path: known[path] for path in wanted if path in known}
        asked = [path for path in wanted if path not in known]
        with suppress(FileNotFoundError):
            try:
                found |= super().read_many(asked, limit=limit)
            except BackendUnreachable:  # it may have ended at this moment: then it is not there the next time
                found |= super().read_many(asked, limit=limit)
        return found

    def names(self, path: str) -> list[str]:
        """See `Transport.names`."""
        if path != f"{self.home}/logs":
            with suppress(FileNotFoundError):
                return super().names(path)
            return []
        nproc, config = self._nproc(), parse_object(self.kept().get("agent.json", b"{}")) or {}
        nodes = [node for node in range(int(config.get("nnodes", 0))) if self.output(node)]
        ranks = [f"rank-{node * nproc + local}.log" for node in nodes for local in range(nproc)]
        return sorted([*ranks, *(f"node-{node}.log" for node in nodes)])

    def _nproc(self) -> int:
        return int((parse_object(self.kept().get("agent.json", b"{}")) or {}).get("nproc", 1))
