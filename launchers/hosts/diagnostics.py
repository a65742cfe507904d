"""Diagnostics of a set of hosts: each alone, in pairs, and all together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import BackendUnreachable, LaunchError
from orc.launchers.findings import Finding
from orc.launchers.hosts import all_reduce, checks, ports

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport

_ORDER = ("error", "warning", "info")


@dataclass(frozen=True)
class HostDiagnostics:
    """Facts, speeds and findings. ``bad`` are the hosts that are better left alone, with the reason."""

    facts_by_host: Sequence[checks.HostFacts]
    speeds: Sequence[all_reduce.HostSpeed] = ()
    findings: Sequence[Finding] = ()
    bad: Mapping[str, str] = field(default_factory=dict)

    def hosts(self) -> list[dict[str, Any]]:
        """Return one JSON-able row per host."""
        speeds = {speed.name: speed for speed in self.speeds}
        rows = []
        for one in self.facts_by_host:
            row: dict[str, Any] = {
                "host": one.name,
                "reachable": not isinstance(one.error, BackendUnreachable),
                "bad": self.bad.get(one.name),
            }
            if one.error is None:
                row |= {key: one.facts[key] for key in ("torch", "cuda", "cpus", "load", "gpus", "executable")}
                row |= {"python": ".".join(map(str, one.facts["python"])), "free_bytes": one.facts["free"]}
                row |= {"memory_bytes": one.facts["memory"]["total"], "skew_s": round(one.skew_s, 3)}
            if speed := speeds.get(one.name):
                row |= {
                    "latency_us": speed.latency_us,
                    "all_reduce_mb_s": speed.mb_s,
                    "best_peer_mb_s": speed.best_mb_s,
                }
                row |= {"gflops": speed.gflops, "node_all_reduce_mb_s": speed.node_mb_s}
                row |= {
                    name: None if promised is None else {"by": promised[0], "mb_s": promised[1]}
                    for name, promised in (("node_promised", speed.node_promised), ("promised", speed.promised))
                }
            rows.append(row)
        return rows


def diagnose_hosts(
    transports: Mapping[str, Transport],
    roots: Mapping[str, str],
    pythons: Mapping[str, str],
    *,
    network: bool = True,
    progress: Callable[[str], None] = lambda _step: None,
) -> HostDiagnostics:
    """Check all hosts; with *network*, try every pair, and run an all-reduce over those that are sound."""
    progress(f"checking {len(transports)} hosts")
    facts_by_host = checks.gather_facts(transports, roots, pythons)
    findings = checks.compare_hosts(facts_by_host) + checks.find_missing_torch(facts_by_host)
    bad = {f.where: f.what for f in reversed(findings) if f.level == "error" and f.where}
    answering = {one.name: transports[one.name] for one in facts_by_host if one.error is None}
    speeds: list[all_reduce.HostSpeed] = []
    if network and answering:
        if len(answering) > 1:
            progress("trying every pair")
            blocked, failed = ports.probe_ports(answering, pythons)
            findings += ports.find_blocked_pairs(blocked, failed)
            for name in (*failed, *ports.failed_hosts(blocked)):
                bad.setdefault(name, "other hosts cannot talk to it")
        facts = {one.name: one.facts for one in facts_by_host}
        sound = {n: t for n, t in answering.items() if n not in bad and facts[n]["torch"]}
        on_gpus = all(facts[name]["gpus"] and facts[name]["cuda"] for name in sound)
        if len(sound) > 1 or any(on_gpus and len(facts[name]["gpus"]) > 1 for name in sound):
            progress("running an all-reduce")
            try:
                speeds = all_reduce.run_all_reduce(sound, pythons, "nccl" if on_gpus else "gloo")
            except LaunchError as error:
                findings.append(Finding("error", error.what, error.where, error.hint))
                if error.where:
                    bad.setdefault(error.where, error.what)
            findings += all_reduce.find_slow_hosts(speeds) + all_reduce.find_broken_promises(speeds)
            # A host that computes slowly may only be busy at this moment; a link does not get faster.
            for speed in all_reduce.hosts_with_slow_network(speeds):
                bad.setdefault(speed.name, f"its network is slow: {speed.best_mb_s:.0f} MB/s at best")
    findings.sort(key=lambda finding: _ORDER.index(finding.level))
    return HostDiagnostics(facts_by_host, speeds, findings, bad)
