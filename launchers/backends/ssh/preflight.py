"""Checks of the hosts of a plan: they answer, are alike, have room, and can talk to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orc.launchers.backends.base import HostReport
from orc.launchers.backends.ssh.rendering import config_of, hosts_of
from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON, Host
from orc.launchers.errors import BackendUnreachable, LaunchError
from orc.launchers.findings import Finding, worst_first
from orc.launchers.oldest_python import brings_python

if TYPE_CHECKING:
    from orc.launchers.backends.ssh.hosts import HostConnections
    from orc.launchers.hosts.checks import HostFacts
    from orc.launchers.plan import Plan


def check(hosts: HostConnections, plan: Plan) -> list[Finding]:
    """Return the findings about the hosts of *plan*, errors first; none when the cluster has preflight off."""
    from orc.launchers.hosts import checks
    from orc.launchers.remote.ssh.fanout import each

    names = hosts_of(plan)
    if not hosts.settings.options.preflight:
        return []
    config = config_of(plan, names[0])
    gpus = int(config["slots"].get("gpus_per_node", 0))
    own = {"environment": bool(config.get("environment")), "own_python": brings_python(config.get("environment"))}
    work = {"look": lambda: checks.compare_hosts(gather_facts(hosts, names), gpus=gpus, **own)}
    if len(names) > 1:
        work["talk"] = lambda: _talk(hosts, names)
    found: list[Finding] = []
    for result in each(work, lambda do: do()).values():
        if isinstance(result, LaunchError):
            raise result
        # A host that does not answer is named once.
        blamed = checks.unusable_hosts(found)
        found += [finding for finding in result if not (finding.where in blamed and finding.level == "error")]
    return worst_first(found)


def gather_facts(hosts: HostConnections, names: Sequence[str]) -> list[HostFacts]:
    """Return the facts about each host, all probed at once."""
    from orc.launchers.hosts import checks

    return checks.gather_facts(
        {name: hosts.transport(name) for name in names},
        {name: hosts.settings.root_of(name) for name in names},
        pythons(hosts, names),
    )


def pythons(hosts: HostConnections, names: Sequence[str]) -> dict[str, str]:
    """Return the interpreter of each host; may begin with ``~``."""
    return {name: hosts.settings.python_of(name) or DEFAULT_PYTHON for name in names}


def _talk(hosts: HostConnections, names: Sequence[str]) -> list[Finding]:
    """Return the pairs of hosts that cannot talk; each names the host that is most likely to blame."""
    from orc.launchers.hosts import diagnostics

    blocked, failed = diagnostics.probe_ports({name: hosts.transport(name) for name in names}, pythons(hosts, names))
    found = diagnostics.find_blocked_pairs((), failed)
    failed_hosts = diagnostics.failed_hosts(blocked)
    for one in blocked:
        pair = [other for other in blocked if {other.source, other.target} == {one.source, one.target}]
        if pair[0] is one:
            to_blame = next((name for name in failed_hosts if name in (one.source, one.target)), "")
            found += [replace(finding, where=to_blame) for finding in diagnostics.find_blocked_pairs(pair, {})]
    return found


def report(hosts: HostConnections, *, own_python: bool) -> list[HostReport]:
    """Return a report of all hosts of the cluster, compared with each other; *own_python* as in `compare_hosts`."""
    from orc.launchers.hosts import checks

    facts_by_host = gather_facts(hosts, hosts.settings.names)
    found = checks.compare_hosts(facts_by_host, environment=True, own_python=own_python)
    found += checks.find_missing_torch(facts_by_host)
    return [
        _report(host, one, tuple(finding for finding in found if finding.where == host.name))
        for host, one in zip(hosts.settings.hosts, facts_by_host, strict=True)
    ]


def _report(host: Host, one: HostFacts, found: tuple[Finding, ...]) -> HostReport:
    facts = one.facts
    if one.error is not None:
        reached = not isinstance(one.error, BackendUnreachable)
        return HostReport(host.name, host.slots or 0, host.labels, reached=reached, findings=found)
    return HostReport(
        name=host.name,
        slots=host.slots or 0,
        labels=host.labels,
        user=str(facts["user"]),
        python=".".join(map(str, facts["python"])),
        torch=str(facts["torch"] or ""),
        cpus=int(facts["cpus"]),
        gpus=len(facts["gpus"]),
        memory_bytes=int(facts["memory"]["total"]),
        free_bytes=int(facts["free"]),
        root=str(facts["root"]),
        findings=found,
    )
