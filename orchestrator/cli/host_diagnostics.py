"""`orc doctor --cluster NAME`: the hosts of one cluster, each alone and all together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import display, waiting
from orc.orchestrator.cli.ui.output import echo, echo_result
from orc.orchestrator.cli.ui.reporting import finding_text

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend
    from orc.launchers.hosts.diagnostics import HostDiagnostics


def run(name: str, *, network: bool, exclude_bad: bool, as_json: bool) -> int:
    """Examine the cluster *name*, show what was found, and return the exit status. Raises `LaunchError`."""
    from orc.launchers.backends import open_backend
    from orc.launchers.backends.base import SupportsHostSurvey
    from orc.launchers.spec.clusters import get_cluster

    backend = open_backend(get_cluster(name))
    if not isinstance(backend, SupportsHostSurvey):
        return _without_hosts(name, as_json)
    made = _examine(backend, network, silent=as_json)
    failed = any(finding.level == "error" for finding in made.findings)
    if exclude_bad:
        from orc.launchers.paths import state_dir
        from orc.orchestrator.engine.placement import exclude

        exclude(state_dir(), name, made.bad)
    if as_json:
        from orc.orchestrator.cli.commands.clusters import finding_dict

        findings = [finding_dict(finding) for finding in made.findings]
        document = {"cluster": name, "ok": not failed, "hosts": made.hosts(), "findings": findings}
        output.echo_json({**document, "bad": dict(made.bad), "excluded": dict(made.bad) if exclude_bad else None})
        return int(failed)
    _show(made)
    if exclude_bad:
        names = ", ".join(made.bad)
        echo(f"\nexcluded from placement: {names}" if names else "\nno host is excluded from placement")
    return int(failed)


def _without_hosts(name: str, as_json: bool) -> int:
    """Show the findings of the backend alone, which has no list of hosts."""
    from orc.orchestrator.cli.commands.clusters import check, finding_dict, findings_text

    with waiting(f"asking {name}"):
        found = check(name)
    failed = any(finding.level == "error" for finding in found)
    echo_result(
        as_json,
        {"cluster": name, "ok": not failed, "findings": [finding_dict(finding) for finding in found]},
        findings_text(found) or f"{name}: nothing to complain about",
    )
    return int(failed)


def _examine(backend: Backend, network: bool, *, silent: bool) -> HostDiagnostics:
    from contextlib import closing

    from orc.launchers.hosts.diagnostics import diagnose_hosts

    with closing(backend), display(silent=silent) as shown:
        stores = backend.stores()
        transports = {name: transport for name, (transport, _) in stores.roots.items()}
        roots = {name: root for name, (_, root) in stores.roots.items()}
        return diagnose_hosts(transports, roots, stores.pythons, network=network, progress=shown.show)


def _show(made: HostDiagnostics) -> None:
    rows = [_row(row) for row in made.hosts()]
    header = ("", "HOST", "PYTHON", "TORCH", "GPUS", "CPUS", "FREE", "CLOCK", "ALL-REDUCE", "BANDWIDTH", "IN NODE")
    echo(output.table(header, rows))
    for finding in made.findings:
        echo("\n" + finding_text(finding))


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    verdict = output.style("bad", fg="red") if row["bad"] else output.style("ok", fg="green")
    if "python" not in row:  # it says nothing about itself
        return (verdict, row["host"], *["-"] * 9)
    gpus = row["gpus"]
    skew = "ok" if abs(row["skew_s"]) < 1 else f"{row['skew_s']:+.0f} s"
    return (
        verdict,
        row["host"],
        row["python"],
        row["torch"] or "-",
        f"{len(gpus)} {gpus[0]['name']}" if gpus else "-",
        str(row["cpus"]),
        output.size(row["free_bytes"]),
        skew,
        f"{row['latency_us'] / 1000:.2f} ms" if "latency_us" in row else "-",
        f"{row['all_reduce_mb_s']:.0f} MB/s" if "latency_us" in row else "-",
        _in_node(row),
    )


def _in_node(row: dict[str, Any]) -> str:
    """``341 of 478 GB/s``: of an all-reduce over all GPUs of the host, and what their links promise."""
    measured, promised = row.get("node_all_reduce_mb_s"), row.get("node_promised")
    if measured is None:
        return "-"
    most = f"of {promised['mb_s'] / 1000:.0f} " if promised else ""
    return f"{measured / 1000:.0f} {most}GB/s"
