"""`orc cost`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from orc.orchestrator.cli.options import MOMENT, output_options
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import echo


@click.command("cost")
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@click.option(
    "--by", default="job", show_default=True, metavar="WHAT", help="job, user, project, cluster, day, tag:KEY."
)
@click.option("--user", "owner", metavar="NAME", help="Only jobs of this user.")
@click.option("--since", type=MOMENT, metavar="TIME", help="Only attempts after it: 2026-01-31, or 7d, 12h ago.")
@click.option("--until", type=MOMENT, metavar="TIME", help="Only attempts before it.")
@output_options("json", "yaml")
def command(
    jobs: tuple[str, ...], by: str, owner: str | None, since: float | None, until: float | None, form: str | None
) -> None:
    """Add up hours of nodes and GPUs, and their cost by the prices of clusters.yaml.

    Running attempts count until now. Hours without a price are shown as unknown.
    """
    client = open_client()
    chosen = [client.resolve(job) for job in jobs] or None
    found = client.costs(by=by, job_ids=chosen, owner=owner, since=since, until=until)
    if output.document(found, form):
        return
    if not found["groups"]:
        echo("nothing has run", err=True)
        return
    header = [by.upper() if not by.startswith("tag:") else by[4:], "JOBS", "NODE HOURS", "GPU HOURS", "COST"]
    rows = [_row(group["key"] or "-", group) for group in found["groups"]]
    if len(rows) > 1:
        rows.append(_row("total", found["total"]))
    echo(output.table(header, rows))


def _row(key: str, group: Mapping[str, Any]) -> list[str]:
    more = "+" if group["running"] else ""
    return [
        key,
        str(group["jobs"]),
        f"{group['node_hours']:.2f}{more}",
        f"{group['gpu_hours']:.2f}{more}",
        _cost(group),
    ]


def _cost(group: Mapping[str, Any]) -> str:
    known = [f"{value:.2f} {currency}" for currency, value in (group["cost"] or {}).items()]
    if group["unpriced_node_hours"] or not known:
        known.append(f"unknown ({group['unpriced_node_hours']:.2f} node hours)" if known else "unknown")
    return " + ".join(known)
