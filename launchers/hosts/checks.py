"""Facts of hosts, gathered side by side and compared: the host that differs from the others is named."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import BackendError, LaunchError
from orc.launchers.findings import Finding, worst_first
from orc.launchers.oldest_python import python_problem
from orc.launchers.remote.programs import Program

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport

PROBE = Program("hosts.probe", ("agent.network", "agent.gpus", "agent.errors"))
_NO_TORCH = "no torch"
SKEW_S = 5.0  # clocks that differ by more make log times and file times misleading
DISK_ERROR, DISK_WARNING = 200 * 1000**2, 5 * 1000**3  # bytes
FACTS_TIMEOUT_S = 30.0
_HOT_C = 90
# Bits of clocks_throttle_reasons.active that mean trouble.
_THROTTLE = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}


@dataclass(frozen=True)
class HostFacts:
    """Facts that one host has reported, and the skew of its clock against ours."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    skew_s: float = 0.0  # its clock minus ours
    took_s: float = 0.0
    error: LaunchError | None = None


def gather_facts(
    transports: Mapping[str, Transport], roots: Mapping[str, str], pythons: Mapping[str, str]
) -> list[HostFacts]:
    """Return the facts of all hosts, one parallel round trip. *roots* and *pythons* are by host name."""
    from orc.launchers.remote.ssh.fanout import each

    def one(name: str) -> HostFacts:
        python = transports[name].expand(pythons.get(name) or "python3")
        sent = time.time()
        done = transports[name].run_program(PROBE, ("facts", roots[name]), python=python, timeout_s=FACTS_TIMEOUT_S)
        received = time.time()
        if done.status:
            lines = done.stderr.strip().splitlines()
            reason = lines[-1] if lines else f"exit status {done.status}"
            raise BackendError(f"{python} cannot be used: {reason}", where=name, hint="Correct `python:` of the host.")
        try:
            facts = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            raise BackendError(
                f"{python} printed something else than was asked for: {done.stdout[:200]!r}",
                where=name,
                hint="A start-up file (.bashrc) that prints belongs behind a check for an interactive shell.",
            ) from None
        # The answer was made at some time between the two.
        early, late = facts["now"] - received, facts["now"] - sent
        return HostFacts(name, facts, 0.0 if early <= 0 <= late else min(early, late, key=abs), received - sent)

    answers = each({name: name for name in transports}, one)
    return [a if isinstance(a, HostFacts) else HostFacts(name, error=a) for name, a in answers.items()]


def compare_hosts(
    facts_by_host: Sequence[HostFacts], *, gpus: int = 0, environment: bool = False, own_python: bool = False
) -> list[Finding]:
    """Return the findings about hosts, errors first. ``where`` of each is the host's name. Pure.

    With *environment* torch is not compared; with *own_python* ranks have another Python than the host's.
    """
    found: list[Finding] = []
    for one in facts_by_host:
        if one.error is not None:
            found.append(Finding.of(one.error, one.name))
        else:
            found += _alone(one, gpus, own_python)
            if gpus and not environment and one.facts["torch"] and not one.facts["cuda"]:
                found.append(cpu_torch(str(one.facts["torch"]), gpus, one.name))
    answered = [one for one in facts_by_host if one.error is None]
    found += _clocks(answered)
    found += _differing(answered, "Python", lambda facts: ".".join(map(str, facts["python"][:2])), "warning")
    if not environment:
        found += _differing(answered, "torch", lambda facts: facts["torch"] or _NO_TORCH, "error")
    found += _differing(answered, "GPU driver", lambda facts: facts["gpus"] and facts["gpus"][0]["driver"], "warning")
    if not gpus:
        found += _differing(answered, "number of GPUs", lambda facts: str(len(facts["gpus"])), "warning")
    return worst_first(found)


def cpu_torch(version: str, gpus: int, where: str) -> Finding:
    """Return the warning that ranks that ask for GPUs will find none under a torch for the CPU."""
    what = f"its torch, {version}, is built for the CPU alone, and the job asks for {gpus} GPUs on each node"
    return Finding("warning", what, where, "Install a torch for CUDA or ROCm, or set `python:` to one that has it.")


def find_missing_torch(facts_by_host: Sequence[HostFacts]) -> list[Finding]:
    """Return a warning where no host has torch: fine for jobs that bring their own Python, and for no others. Pure."""
    answered = [one for one in facts_by_host if one.error is None]
    if not answered or any(one.facts["torch"] for one in answered):
        return []
    hint = "Set `python:` of the cluster to one that has it, or give the jobs an `environment:`."
    what = f"{answered[0].facts['executable']} has no torch" + (", on no host" if len(answered) > 1 else "")
    return [Finding("warning", what, answered[0].name, hint)]


def unusable_hosts(findings: Iterable[Finding]) -> list[str]:
    """Return the hosts with an error, in order: no job should be given them now."""
    return list(dict.fromkeys(f.where for f in findings if f.level == "error" and f.where))


def _alone(one: HostFacts, gpus: int, own_python: bool) -> list[Finding]:
    """Return the findings about one host, whatever the others are like."""
    facts, found = one.facts, []
    if problem := python_problem(facts["python"], environment=own_python):
        hint = "Set `python:` of the cluster, or of this host, to a newer one; or give the job an `environment:`."
        found.append(Finding("error", f"{facts['executable']} is {problem}", one.name, hint))
    if not facts["writable"]:
        hint = "Set `root:` of the cluster, or of this host, to a directory that you can write."
        found.append(Finding("error", f"{facts['root']} cannot be written", one.name, hint))
    if facts["free"] < DISK_WARNING:
        what = f"only {facts['free'] / 1000**2:.0f} MB are free in {facts['root']}"
        hint = "Free some space, or set `root:` to another file system."
        found.append(Finding("error" if facts["free"] < DISK_ERROR else "warning", what, one.name, hint))
    return [*found, *_gpus(one, gpus)]


def _gpus(one: HostFacts, wanted: int) -> list[Finding]:
    facts, found = one.facts, []
    hint = "See `nvidia-smi` and `dmesg | grep -i xid` there; it may need a reset."
    if facts["gpu_error"]:
        found.append(Finding("error", f"nvidia-smi: {facts['gpu_error']}", one.name, hint))
    elif (facts["gpus_known"] or 0) > len(facts["gpus"]) and facts["gpus"]:
        lost = facts["gpus_known"] - len(facts["gpus"])
        found.append(Finding("error", f"{lost} of {facts['gpus_known']} GPUs do not answer", one.name, hint))
    has = len(facts["gpus"]) or facts["gpus_known"]  # AMD's have no nvidia-smi
    if has is not None and wanted > has and not facts["gpu_error"]:
        what = f"it has {has} GPUs, the job asks for {wanted}"
        found.append(Finding("error", what, one.name, "Lower resources.gpus_per_node, or leave this host out."))
    for gpu in facts["gpus"]:
        name = f"GPU {gpu['index']} ({gpu['name']})"
        if (errors := _number(gpu["ecc"])) > 0:
            what = f"{name} has {errors} uncorrected memory errors since the driver was loaded"
            found.append(Finding("error", what, one.name, hint))
        reasons = {text for bit, text in _THROTTLE.items() if _number(gpu["throttle"]) & bit}
        if reasons:
            what = f"{name} is slowed down: {', '.join(sorted(reasons))}"
            found.append(Finding("warning", what, one.name, "See its cooling and power supply."))
        elif _number(gpu["temperature"]) >= _HOT_C:
            found.append(Finding("warning", f"{name} has {gpu['temperature']} °C", one.name, "See its cooling."))
    return found


def _number(text: str) -> int:
    """Return a number as nvidia-smi prints it: decimal, hexadecimal, or nothing where it does not apply ([N/A])."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


def _clocks(facts_by_host: Sequence[HostFacts]) -> list[Finding]:
    """Return warnings of clocks that differ from ours, or, when ours is wrong, from those of the others."""
    if not facts_by_host:
        return []
    middle = statistics.median(one.skew_s for one in facts_by_host)
    hint = "Start a time service there (chrony, systemd-timesyncd)."
    if len(facts_by_host) > 2 and abs(middle) > SKEW_S:
        what = f"this machine's clock is {_apart(-middle)} of the hosts'"
        found = [Finding("warning", what, "this machine", "Start a time service here (chrony, systemd-timesyncd).")]
    else:
        middle, found = 0.0, []
    for one in facts_by_host:
        if abs(one.skew_s - middle) > SKEW_S:
            found.append(
                Finding("warning", f"its clock is {_apart(one.skew_s - middle)} of the others", one.name, hint)
            )
    return found


def _apart(skew_s: float) -> str:
    length = abs(skew_s)
    text = f"{length:.0f} s" if length < 600 else f"{length / 60:.0f} min"
    return f"{text} {'ahead' if skew_s > 0 else 'behind'}"


def _differing(facts_by_host: Sequence[HostFacts], what: str, value: Any, level: Any) -> list[Finding]:
    """Return findings about hosts that are unlike most others in one respect; hosts without a value do not count."""
    values = {one.name: value(one.facts) for one in facts_by_host if value(one.facts)}
    if len(set(values.values())) < 2:
        return []
    # Of two hosts the one that lacks it is to blame, whatever their order.
    counted = Counter(value for value in values.values() if value != _NO_TORCH)
    common, count = counted.most_common(1)[0]
    hint = f"Give all hosts the same {what}, or leave this one out."
    if count * 2 <= counted.total():  # no value has a majority
        listed = ", ".join(f"{name} {version}" for name, version in values.items())
        return [Finding(level, f"{what} differs: {listed}", next(iter(values)) if level == "error" else "", hint)]
    return [
        Finding(level, f"{what}: it has {version}, the others {common}", name, hint)
        for name, version in values.items()
        if version != common
    ]
