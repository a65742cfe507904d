"""`orc queue`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import cluster_option_for, output_options
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.launchers.backends.base import QueueReport


@click.command("queue")
@cluster_option_for("This cluster. [default: all with a queue]")
@output_options("json", "yaml")
def command(cluster: str | None, form: str | None) -> int:
    """Show the queues of clusters: partitions, and of our jobs the reason why they wait and the expected start.

    Exit status 1 when a cluster did not answer; the others are shown.
    """
    client = open_client()
    names, errors = ([cluster], {}) if cluster is not None else client.queueing_clusters()
    if not names and not errors:
        raise LaunchError("no cluster has a queue of its own", hint="`orc list --state QUEUED` shows what waits here.")
    reports: dict[str, QueueReport] = {}
    for name in names:
        try:
            with waiting(f"asking {name} for its queue"):
                reports[name] = client.queue(name)
        except LaunchError as error:
            if cluster is not None:
                raise
            errors[name] = error
    if not output.document({"clusters": _to_list(reports, errors)}, form):
        echo("\n\n".join(_text(name, report, len(names) > 1) for name, report in reports.items()))
        for silent in errors.values():
            echo(f"\n{silent}", err=True)
    return int(bool(errors))


def _to_list(reports: Mapping[str, QueueReport], errors: Mapping[str, LaunchError]) -> list[dict[str, Any]]:
    from orc.orchestrator.views import encode

    found = [{"cluster": name, **encode(report)} for name, report in reports.items()]
    return [*found, *({"cluster": name, "error": str(error)} for name, error in errors.items())]


def _text(name: str, report: QueueReport, titled: bool) -> str:
    from orc.launchers.ids import AttemptId

    partitions = [
        (
            f"{p.name}{'*' if p.default else ''}",
            p.state,
            f"{p.idle_nodes}/{p.nodes}",
            f"{p.idle_cpus}/{p.cpus}",
            output.duration(p.limit_s) if p.limit_s is not None else "none",
            ", ".join(p.resources) or "-",
        )
        for p in report.partitions
    ]
    parts = [output.table(("PARTITION", "STATE", "IDLE NODES", "IDLE CORES", "TIME LIMIT", "GRES"), partitions)]
    jobs = [
        (
            AttemptId.from_marker(job.marker).job,
            job.native_id,
            job.state,
            job.partition,
            str(job.nodes),
            _start(job.starts_at),
            job.reason or "-",
        )
        for job in report.jobs
    ]
    header = ("JOB", "NUMBER THERE", "STATE", "PARTITION", "NODES", "STARTS", "REASON")
    parts.append(output.table(header, jobs) if jobs else "none of our jobs is there")
    return "\n\n".join([*([f"{name}:"] if titled else []), *parts])


def _start(at: float | None) -> str:
    if at is None:
        return "unknown"
    return output.clock(at) if at <= time.time() else f"{output.clock(at)} (in {output.duration(at - time.time())})"
