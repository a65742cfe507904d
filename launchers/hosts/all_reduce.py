"""A small all-reduce over all hosts: that it works, its speed, and the hosts that hold the others up."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import BackendError, LaunchError
from orc.launchers.findings import Finding
from orc.launchers.hosts.all_reduce_probe import PCI_EXPRESS
from orc.launchers.remote.programs import Program

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Process, Transport

PROBE = Program("hosts.all_reduce_probe", ("agent.network", "agent.errors"))
TIMEOUT_S = 120.0
_FAILED = "the all-reduce probe failed"
# Of the median: a host below is named.
SLOW_NETWORK, SLOW_COMPUTE = 0.5, 0.4
# Of what the hardware promises: less is no matter of protocols, which take up to half.
BROKEN = 0.3
# Over PCI Express between two sockets, or without peer-to-peer access, GPUs go through the memory of the host.
BROKEN_PCI_EXPRESS = 0.1


@dataclass(frozen=True)
class HostSpeed:
    """Speeds of one host in the probe."""

    name: str
    latency_us: float  # of an all-reduce of 4 bytes, median
    mb_s: float  # bus bandwidth of an all-reduce of 16 MiB (256 MiB over GPUs), in megabytes per second
    best_mb_s: float  # with the peer it gets on best with
    gflops: float  # matrix product, one thread (or the slowest of its GPUs)
    node_mb_s: float | None = None  # bus bandwidth of an all-reduce over all GPUs of the host, where it has several
    node_promised: tuple[str, float] | None = None  # what joins these, and megabytes per second of that
    promised: tuple[str, float] | None = None  # the same of what GPUs of different hosts talk over


def run_all_reduce(
    transports: Mapping[str, Transport], pythons: Mapping[str, str], backend: str = "gloo"
) -> list[HostSpeed]:
    """Run the probe over all hosts, one process each. Raises `BackendError` that names the host where it failed."""
    from orc.launchers.remote.ssh.fanout import each

    names = list(transports)

    def arguments(rank: int) -> tuple[str, ...]:
        return str(rank), str(len(names)), backend

    def python(rank: int) -> str:
        return pythons.get(names[rank]) or "python3"

    with transports[names[0]].stream_program(PROBE, arguments(0), python=python(0), timeout_s=TIMEOUT_S) as first:
        place = read_line(first, names[0], _FAILED)

        def follow(rank: int) -> dict[str, Any]:
            if rank == 0:
                return dict(json.loads(read_line(first, names[0], _FAILED)))
            done = transports[names[rank]].run_program(
                PROBE, arguments(rank), python=python(rank), timeout_s=TIMEOUT_S, stdin=place + b"\n"
            )
            if done.status:
                raise BackendError(_last(done.stderr, done.status), where=names[rank])
            return dict(json.loads(done.stdout.splitlines()[-1]))

        answers = each({name: rank for rank, name in enumerate(names)}, follow, limit=len(names))
    failures = {name: answer for name, answer in answers.items() if isinstance(answer, LaunchError)}
    if failures:
        # A rank that waits for another one fails later and says less.
        name, error = min(
            failures.items(), key=lambda item: "imed out" in item[1].what or "losed by peer" in item[1].what
        )
        raise BackendError(f"{_FAILED}: {error.what}", where=name, hint=error.hint)
    results = {name: answer for name, answer in answers.items() if not isinstance(answer, LaunchError)}
    return [
        HostSpeed(
            name,
            r["latency_us"],
            r["mb_s"],
            max(r["pairs"].values(), default=0.0),
            r["gflops"],
            r.get("node_mb_s"),
            _promise(r.get("node_promised")),
            _promise(r.get("promised")),
        )
        for name, r in results.items()
    ]


def find_broken_promises(speeds: Sequence[HostSpeed]) -> list[Finding]:
    """Return a warning for each host whose GPUs talk far more slowly than their hardware can. Pure."""
    found = []
    for speed in speeds:
        links, card = "See `nvidia-smi topo -m` and `nvidia-smi nvlink -s`", "See the state of its network card"
        for whose, measured, promised, hint in (
            ("its GPUs reduce", speed.node_mb_s, speed.node_promised, links),
            ("it sends", speed.best_mb_s or None, speed.promised, card),
        ):
            if measured is None or promised is None:
                continue
            if measured < (BROKEN_PCI_EXPRESS if promised[0] == PCI_EXPRESS else BROKEN) * promised[1]:
                what = f"{whose} at {measured / 1000:.1f} GB/s, where {promised[0]} promises {promised[1] / 1000:.0f}"
                more = f"{hint} there, and what a job with NCCL_DEBUG=INFO says of its transports."
                found.append(Finding("warning", what, speed.name, more))
    return found


def _promise(answer: Sequence[Any] | None) -> tuple[str, float] | None:
    return None if answer is None else (str(answer[0]), float(answer[1]))


def hosts_with_slow_network(speeds: Sequence[HostSpeed]) -> list[HostSpeed]:
    """Return the hosts whose best connection is much slower than the median host's. Pure."""
    network = statistics.median(speed.best_mb_s for speed in speeds) if len(speeds) > 2 else 0.0
    return [speed for speed in speeds if speed.best_mb_s < SLOW_NETWORK * network]


def find_slow_hosts(speeds: Sequence[HostSpeed]) -> list[Finding]:
    """Return a warning for each host that is much slower than the median. Of two hosts neither is blamed. Pure."""
    if len(speeds) < 3:
        return []
    found = []
    network = statistics.median(speed.best_mb_s for speed in speeds)
    compute = statistics.median(speed.gflops for speed in speeds)
    for speed in speeds:
        if speed in hosts_with_slow_network(speeds):
            what = f"its network is slow: {speed.best_mb_s:.0f} MB/s at best, the median host has {network:.0f}"
            found.append(
                Finding("warning", what, speed.name, "An all-reduce waits for the slowest: leave this host out.")
            )
        if speed.gflops < SLOW_COMPUTE * compute:
            what = f"it computes slowly: {speed.gflops:.0f} GFLOP/s, the median host does {compute:.0f}"
            found.append(Finding("warning", what, speed.name, "Another program may run there: see `top`."))
    return found


def read_line(process: Process, name: str, failed: str) -> bytes:
    """Return the next line that the program on a host prints.

    Raises `BackendError` that begins with *failed* where it ends before, `BackendUnreachable`.
    """
    received = b""
    while not received.endswith(b"\n"):
        piece = process.read(65536)
        if not piece:
            done = process.wait()
            raise BackendError(f"{failed}: {_last(done.stderr, done.status)}", where=name)
        received += piece
    return received.strip().splitlines()[-1]


def _last(stderr: str, status: int) -> str:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {status}"
