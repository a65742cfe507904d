"""Diagnostics of the hosts of a cluster: each alone, the connections between them, and an all-reduce over all.

Every host listens on a free port, and every other one connects to it: ranks and agents choose their ports freely, so a
firewall that lets only SSH through shows here, with the pair's names.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import BackendUnreachable, LaunchError
from orc.launchers.findings import Finding, worst_first
from orc.launchers.hosts import all_reduce, checks
from orc.launchers.hosts.checks import PROBE

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Process, Transport


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
            blocked, failed = probe_ports(answering, pythons)
            findings += find_blocked_pairs(blocked, failed)
            for name in (*failed, *failed_hosts(blocked)):
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
    return HostDiagnostics(facts_by_host, speeds, worst_first(findings), bad)


EVERY_PAIR = 32  # up to so many hosts; more try peers at distances 1, 2, 4, ... in both directions
CONVERSATION_S = 60.0


@dataclass(frozen=True)
class BlockedConnection:
    """Direction between two hosts in which no connection is made."""

    source: str
    target: str
    reason: str


def peers_of(names: Sequence[str], index: int) -> list[str]:
    """Return the hosts that the one at *index* connects to. Pure."""
    if len(names) <= EVERY_PAIR:
        return [name for name in names if name != names[index]]
    steps = [1 << power for power in range(len(names).bit_length()) if 1 << power < len(names)]
    reached = {(index + sign * step) % len(names) for step in steps for sign in (1, -1)}
    return [names[other] for other in sorted(reached - {index})]


def probe_ports(
    transports: Mapping[str, Transport], pythons: Mapping[str, str]
) -> tuple[list[BlockedConnection], dict[str, LaunchError]]:
    """Return the directions that are blocked, and the errors of hosts that could not be reached."""
    from orc.launchers.remote.ssh.fanout import each

    names = list(transports)
    tokens = {name: secrets.token_hex(16) for name in names}
    conversations: dict[str, Process] = {}
    with ExitStack() as stack:

        def listen(name: str) -> dict[str, Any]:
            python, words = pythons.get(name) or "python3", ("ports", tokens[name], str(CONVERSATION_S))
            started = transports[name].stream_program(PROBE, words, python=python, timeout_s=CONVERSATION_S)
            conversations[name] = stack.enter_context(started)
            return {"name": name, "token": tokens[name], **_answer(conversations[name], name)}

        listeners = each({name: name for name in names}, listen)
        failed = {name: answer for name, answer in listeners.items() if isinstance(answer, LaunchError)}
        open_ones = {name: answer for name, answer in listeners.items() if not isinstance(answer, LaunchError)}
        reachable = list(open_ones)

        def connect(name: str) -> dict[str, str]:
            targets = [open_ones[peer] for peer in peers_of(reachable, reachable.index(name))]
            conversations[name].write(json.dumps(targets).encode() + b"\n")
            return _answer(conversations[name], name)

        answers = each({name: name for name in reachable}, connect) if len(reachable) > 1 else {}
        for conversation in conversations.values():
            with suppress(LaunchError):
                conversation.close_stdin()  # all end at the same time, not one after the other
    blocked = []
    for name, answer in answers.items():
        if isinstance(answer, LaunchError):
            failed[name] = answer
        else:
            blocked += [BlockedConnection(name, target, reason) for target, reason in answer.items() if reason]
    # A host that has gone away meanwhile is the only one to blame.
    return [one for one in blocked if not {one.source, one.target} & set(failed)], failed


def _answer(conversation: Process, name: str) -> dict[str, Any]:
    return dict(json.loads(all_reduce.read_line(conversation, name, "the host cannot be asked")))


def find_blocked_pairs(blocked: Sequence[BlockedConnection], failed: Mapping[str, LaunchError]) -> list[Finding]:
    """Return one finding per pair of hosts between which no connection is made. Pure."""
    found = [Finding.of(error, name) for name, error in failed.items()]
    by_pair: dict[frozenset[str], list[BlockedConnection]] = {}
    for one in blocked:
        by_pair.setdefault(frozenset((one.source, one.target)), []).append(one)
    for group in by_pair.values():
        first = group[0]
        pair = f"{first.source} and {first.target}" if len(group) == 2 else f"{first.source} to {first.target}"
        what = f"{pair} cannot talk: no connection to a free port ({first.reason})"
        found.append(
            Finding("error", what, "", "Open the TCP ports above 1024 between them; ranks and agents choose freely.")
        )
    return found


def failed_hosts(blocked: Sequence[BlockedConnection]) -> list[str]:
    """Return the smallest set of hosts (greedily) without which all others reach each other. Pure."""
    left = {frozenset((one.source, one.target)) for one in blocked}
    chosen = []
    while left:
        counts: dict[str, int] = {}
        for pair in left:
            for name in pair:
                counts[name] = counts.get(name, 0) + 1
        worst = max(sorted(counts), key=lambda name: counts[name])
        chosen.append(worst)
        left = {pair for pair in left if worst not in pair}
    return chosen
