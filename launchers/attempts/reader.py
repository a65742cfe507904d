"""Reading attempt directories: the records of many attempts in few round trips, and their logs.

Everything goes through a `Transport`, so it does not matter whether the directories are on this machine.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orc.launchers.agent.records import NODE_RECORD_BYTES, RECORD_BYTES, parse_record
from orc.launchers.attempts.records import AttemptExit, LogChunk, LogSelector, is_exit, merge

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport

CHUNK_BYTES = 1 << 20
# What stands between the backend and the agents prints, as Slurm's batch script does; most backends have nothing there.
LAUNCHER_LOG = "launcher.log"
_LOG = re.compile(r"(rank|node)-([0-9]+)\.log")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class AttemptRecords:
    """Records of an attempt: those of its current incarnation (the highest restart) by node."""

    directory: str
    config: Record | None = None  # agent.json
    gang: Record | None = None
    cancel: Record | None = None
    leases: Mapping[int, Record] = field(default_factory=dict)
    heartbeats: Mapping[int, Record] = field(default_factory=dict)
    exits: Mapping[int, Record] = field(default_factory=dict)
    stop: Record | None = None  # what the first node to stop told the others
    restart: int = 0  # the incarnation that the records belong to

    @property
    def nnodes(self) -> int:
        """Number of nodes; 1 when ``agent.json`` is not there."""
        return int((self.config or {}).get("nnodes", 1))

    @property
    def has_secrets(self) -> bool:
        """Return whether values of secrets were brought for it."""
        return bool((self.config or {}).get("secrets"))

    @property
    def complete(self) -> bool:
        """Return whether every node has an exit record."""
        without = {int(node) for record in self.exits.values() for node in record.get("lost_nodes", ())}
        return len(self.exits.keys() | without) >= self.nnodes

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names in node order, as far as nodes have started."""
        return tuple(str(lease.get("host", "")) for _, lease in sorted(self.leases.items()))

    @property
    def silent(self) -> tuple[str, ...]:
        """Host names of the nodes that have started in this incarnation and left no exit record."""
        own = _of(self.restart, self.leases)
        return tuple(str(lease.get("host")) for node, lease in sorted(own.items()) if node not in self.exits)

    @property
    def started_at(self) -> float | None:
        """Return when the first node started, in seconds since the epoch."""
        return min((float(lease["at"]) for lease in self.leases.values() if lease.get("at")), default=None)

    @property
    def last_sign(self) -> float | None:
        """Return the time of the newest heartbeat, by its node's own clock."""
        return max((float(beat["at"]) for beat in self.heartbeats.values() if beat.get("at")), default=None)

    @property
    def states(self) -> tuple[str, ...]:
        """Return the states of the nodes (setup, waiting, running, stopping), in node order."""
        return tuple(str(beat.get("state", "")) for _, beat in sorted(self.heartbeats.items()))

    @property
    def progress(self) -> Mapping[str, Any]:
        """The runtime's newest ``{"step": ..., "epoch": ..., "loss": ...}``; ``stall`` is its watchdog's report."""
        beats = [beat for _, beat in sorted(self.heartbeats.items())]
        found = [beat["progress"] for beat in beats if beat.get("progress")]
        newest: Mapping[str, Any] = max(found, key=lambda progress: _number(progress.get("step")), default={})
        stall = next((str(beat["stall"]) for beat in beats if beat.get("stall")), "")
        return {**newest, "stall": stall} if stall else newest

    @cached_property
    def verdict(self) -> AttemptExit | None:
        """The merged exit records; `None` while there is nothing to judge by.

        The node that stopped first may have died before it wrote its exit record; its word to the others then counts.
        """
        records: list[Record] = list(self.exits.values())
        if self.stop is not None and int(self.stop.get("node", -1)) not in self.exits:
            records.append({**self.stop, "ended_at": self.stop.get("at")})
        merged = merge(records, self.nnodes)
        return None if merged is None else replace(merged, complete=self.complete)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else -1.0


def read_attempts(
    transport: Transport, directories: Sequence[str], planned: Mapping[str, int] | None = None
) -> dict[str, AttemptRecords]:
    """Return the records of many attempts, in three round trips at most.

    *planned* are the most nodes that their plans have, by directory, where that is known: what ``agent.json`` says of
    them counts up to there, as a job can write over it. Raises what the transport raises.
    """
    shared = _read(
        transport, (f"{d}/{name}.json" for d in directories for name in ("agent", "gang", "cancel")), RECORD_BYTES
    )
    for directory, most in (planned or {}).items():
        config = shared.get(f"{directory}/agent.json")
        if config is not None and most:
            config["nnodes"] = min(config.get("nnodes", 1), most)
    paths = []
    for directory in directories:
        nnodes = int((shared.get(f"{directory}/agent.json") or {}).get("nnodes", 1))
        for node in range(nnodes):
            paths += [f"{directory}/node-{node}/{name}.json" for name in ("lease", "heartbeat", "exit")]
    own = _read(transport, paths, NODE_RECORD_BYTES)
    found = {}
    for directory in directories:
        by_name: dict[str, dict[int, Record]] = {"lease": {}, "heartbeat": {}, "exit": {}}
        nnodes = int((shared.get(f"{directory}/agent.json") or {}).get("nnodes", 1))
        for node in range(nnodes):
            for name, records in by_name.items():
                record = own.get(f"{directory}/node-{node}/{name}.json")
                if record is not None and (name != "exit" or is_exit(record)):
                    records[node] = record
        restart = max((int(lease.get("restart", 0)) for lease in by_name["lease"].values()), default=0)
        found[directory] = AttemptRecords(
            directory=directory,
            config=shared.get(f"{directory}/agent.json"),
            gang=shared.get(f"{directory}/gang.json"),
            cancel=shared.get(f"{directory}/cancel.json"),
            leases=by_name["lease"],
            heartbeats=_of(restart, by_name["heartbeat"]),
            exits=_of(restart, by_name["exit"]),
            restart=restart,
        )
    stop_paths = {d: f"{d}/stop-r{r.restart}.json" for d, r in found.items() if r.leases and not r.complete}
    stops = _read(transport, stop_paths.values(), NODE_RECORD_BYTES) if stop_paths else {}
    for directory, path in stop_paths.items():
        if path in stops:
            found[directory] = replace(found[directory], stop=stops[path])
    return found


def _of(restart: int, records: Mapping[int, Record]) -> dict[int, Record]:
    return {node: record for node, record in records.items() if int(record.get("restart", 0)) == restart}


def _read(transport: Transport, paths: Iterable[str], limit: int) -> dict[str, dict[str, Any]]:
    records = {}
    for path, data in transport.read_many(list(paths), limit=limit).items():
        record = parse_record(data)
        if record is not None:  # else a crashed machine has lost it, or somebody else has written it
            records[path] = record
    return records


def log_selectors(transport: Transport, directory: str) -> list[LogSelector]:
    """The logs that an attempt has so far: ranks in order, then nodes, then the launcher's."""
    names = transport.names(posixpath.join(directory, "logs"))
    found = sorted((match[1] == "node", int(match[2])) for name in names if (match := _LOG.fullmatch(name)))
    own = [LogSelector(node=number) if is_node else LogSelector(rank=number) for is_node, number in found]
    return [*own, LogSelector(launcher=True)] if LAUNCHER_LOG in names else own


def log_path(directory: str, selector: LogSelector) -> str:
    """Return the path of one log of the attempt at *directory*."""
    name = f"rank-{selector.rank}.log" if selector.rank is not None else f"node-{selector.node}.log"
    return posixpath.join(directory, "logs", LAUNCHER_LOG if selector.launcher else name)


def read_log(transport: Transport, directory: str, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
    """Yield one log from byte *offset* on, in chunks of `CHUNK_BYTES`; nothing while the log is not there."""
    path = log_path(directory, selector)
    while True:
        try:
            data = transport.read(path, offset=offset, limit=CHUNK_BYTES)
        except FileNotFoundError:
            return
        if data:
            yield LogChunk(selector, offset, data)
            offset += len(data)
        if len(data) < CHUNK_BYTES:
            return


def read_job_file(transport: Transport, directory: str, name: str, offset: int = 0, limit: int | None = None) -> bytes:
    """Return at most *limit* bytes of *name* beside the attempt at *directory* from *offset* on; none without it."""
    try:
        return transport.read(posixpath.join(posixpath.dirname(directory), name), offset=offset, limit=limit)
    except FileNotFoundError:
        return b""
