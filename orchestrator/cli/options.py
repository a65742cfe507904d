"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class _Seconds(click.FloatRange):
    """A duration. click lets "nan" through any range, because it is neither below nor above."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


SECONDS = _Seconds(0, 10 * 366 * 86400)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/reference/cli.md).")


def _complete_jobs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from orc.orchestrator.client import Client

    with Client() as client:
        rows = client.jobs(limit=200)
    return [CompletionItem(row.id, help=row.state) for row in rows if row.id.startswith(incomplete)]


def complete_clusters(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the clusters whose names begin with *incomplete*."""
    from click.shell_completion import CompletionItem

    from orc.launchers.spec.clusters import load_clusters

    clusters = load_clusters()
    return [CompletionItem(name, help=c.kind) for name, c in clusters.items() if name.startswith(incomplete)]


job_argument = click.argument("job", shell_complete=_complete_jobs)
jobs_argument = click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=_complete_jobs)
optional_jobs_argument = click.argument("jobs", metavar="[JOB]...", nargs=-1, shell_complete=_complete_jobs)
cluster_option = click.option(
    "--cluster", metavar="NAME", shell_complete=complete_clusters, help="Cluster to use instead of the job file's."
)
cluster_argument = click.argument("name", shell_complete=complete_clusters)
job_file_argument = click.argument("job_file", metavar="JOB.yaml", type=click.Path())


def set_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--set key=value``, repeatable: overrides of the job file."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key of the job file, like resources.nodes=4. May be repeated.",
    )(function)
