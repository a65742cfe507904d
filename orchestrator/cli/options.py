"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from orc.orchestrator.clients.surface import JobsClient


class _Seconds(click.FloatRange):
    """A duration. click lets "nan" through any range, because it is neither below nor above."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


class _Age(click.ParamType[float]):
    """``7d``, ``12h``, ``90m``: seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from orc.launchers.spec.grammar import seconds

        try:
            return seconds(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Moment(click.ParamType["float | None"]):
    """Moment, in seconds since the epoch: a date, a date and time, or how long ago."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        import datetime
        import time

        text = str(value)
        try:
            if text[:-1].isdigit() and text[-1:].isalpha() and len(text) < 8:
                from orc.launchers.spec.grammar import seconds

                return time.time() - seconds(text)
            return datetime.datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{text!r} is no time: 2026-01-31, 2026-01-31T12:00, or 7d, 12h, 30m ago.", param, ctx)


SECONDS = _Seconds(0, 10 * 366 * 86400)
AGE = _Age()
MOMENT = _Moment()

JOB_FILE = "job.yaml"
# Settings of a command whose options are documented with underscores (--config_file); hyphens work, too.
EITHER_SPELLING: dict[str, Any] = {"token_normalize_func": lambda name: name.replace("_", "-")}

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/reference/cli.md).")
STATES = ("QUEUED", "PREPARED", "SUBMITTING", "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
LIVE_STATES = STATES[:5]


def together(*options: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator that adds *options*, in their order."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def output_options(*forms: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``-o FORM`` (one of *forms*; parameter *form*), and ``--json``, which is short for ``-o json``."""
    return together(
        click.option("-o", "--output", "form", type=click.Choice(forms), help="How to print."),
        click.option(
            "--json", "form", flag_value="json", default=None, help="The same as -o json (docs/reference/cli.md)."
        ),
    )


def filter_options(states: tuple[str, ...] = STATES) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--state`` (of *states*), ``--name``, ``--tag`` and ``--group``.

    The parameters are *states*, *name*, *tags* and *group*.
    """

    choice = click.Choice(states, case_sensitive=False)
    return together(
        click.option("--state", "states", multiple=True, type=choice, help="Jobs in this state. May be repeated."),
        click.option("--name", help="Jobs of this name."),
        click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Jobs with this tag. May be repeated."),
        click.option("--group", metavar="ID", help="Jobs of this sweep, array, pipeline or schedule."),
    )


def tag_pairs(texts: tuple[str, ...]) -> dict[str, str] | None:
    """Return ``--tag`` options as a mapping, `None` without any. Raises `click.UsageError`."""
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise click.UsageError(f"--tag takes key=value, not {text!r}", click.get_current_context())
    return {key: value for key, _, value in (text.partition("=") for text in texts)} or None


def job_ids(client: JobsClient, refs: Sequence[str]) -> list[str]:
    """Return the ids of the jobs that *refs* mean; the id of a group means its members. Raises `JobNotFound`."""
    found: list[str] = []
    for ref in refs:
        rows = client.jobs(group=ref, limit=None) if "-" in ref else []
        newest = {row.group_index: row.id for row in reversed(rows)}  # a member may have been submitted again
        found += [newest[number] for number in sorted(newest, key=lambda number: number or 0)]
        found += [] if newest else [client.resolve(ref)]
    return list(dict.fromkeys(found))


def _complete_jobs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from orc.orchestrator.clients.connecting import connect

    with connect() as client:
        rows = client.jobs(limit=200)
    return [CompletionItem(row.id, help=row.state) for row in rows if row.id.startswith(incomplete)]


def complete_clusters(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the clusters whose names begin with *incomplete*."""
    from click.shell_completion import CompletionItem

    from orc.launchers.spec.clusters import read_clusters

    clusters = read_clusters()[0]
    return [CompletionItem(name, help=c.kind) for name, c in clusters.items() if name.startswith(incomplete)]


job_argument = click.argument("job", shell_complete=_complete_jobs)
newest_job_argument = click.argument("job", metavar="[JOB]", default="@last", shell_complete=_complete_jobs)
optional_jobs_argument = click.argument("jobs", metavar="[JOB]...", nargs=-1, shell_complete=_complete_jobs)


def cluster_option_for(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return ``--cluster NAME`` with *what* as its help."""
    return click.option("--cluster", metavar="NAME", shell_complete=complete_clusters, help=what)


cluster_option = cluster_option_for("Cluster to use instead of the job file's.")
following_option = click.option(
    "-f", "--follow", "following", is_flag=True, help="Go on until the job has ended, over its retries."
)
refresh_option = click.option("--refresh/--no-refresh", default=True, help="Ask the clusters first (the default).")
yes_option = click.option("-y", "--yes", is_flag=True, help="Send a large snapshot without asking.")
limit_option = click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="Largest number of lines."
)
cluster_argument = click.argument("name", shell_complete=complete_clusters)


def job_file_here(ctx: click.Context, _param: click.Parameter, given: str | None) -> str | None:
    """Return the job file that was *given*, or the one of the current directory. Raises `click.UsageError`."""
    import os

    if given is not None or ctx.resilient_parsing:
        return given
    if not os.path.lexists(JOB_FILE):
        raise click.UsageError(f"name a file: there is no {JOB_FILE} in the current directory", ctx)
    return JOB_FILE


job_file_argument = click.argument(
    "job_file", metavar="[JOB.yaml]", required=False, type=click.Path(), callback=job_file_here
)


def _complete_setting(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from orc.orchestrator.cli.settings import complete

    return complete(incomplete)


set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=_complete_setting,
    help="Override a key of the job file, like resources.nodes=4. May be repeated.",
)
