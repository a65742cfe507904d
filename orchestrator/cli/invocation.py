"""Invocation of a command: options that several commands share, and the client that a command works with."""

from __future__ import annotations

import datetime
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.findings import Finding
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import waiting

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.client import Client
    from orc.orchestrator.clients.logins import Login
    from orc.orchestrator.clients.service import ServiceClient
    from orc.orchestrator.clients.surface import JobsClient


class _Seconds(click.FloatRange):
    """A duration. click lets "nan" through any range, because it is neither below nor above."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


class Parsed(click.ParamType[Any]):
    """Value that *parse* makes of a text; its `ValueError` says what is wrong."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the parsed value."""
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def seconds(text: str) -> float:
    """Return ``7d``, ``12h``, ``90m`` in seconds. Raises `ValueError`."""
    from orc.launchers.spec import grammar

    return grammar.seconds(text)


def _moment(text: str) -> float:
    """Return a date, a date and time, or how long ago, in seconds since the epoch. Raises `ValueError`."""
    try:
        if text[:-1].isdigit() and text[-1:].isalpha() and len(text) < 8:
            return time.time() - seconds(text)
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is no time: 2026-01-31, 2026-01-31T12:00, or 7d, 12h, 30m ago.") from None


SECONDS = _Seconds(0, 10 * 366 * 86400)
AGE = Parsed("age", seconds)
MOMENT = Parsed("time", _moment)

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

    The parameter is *wanted*: arguments of `JobsClient.jobs`, each `None` where the option is not given.
    """
    choice = click.Choice(states, case_sensitive=False)
    add = together(
        click.option("--state", "states", multiple=True, type=choice, help="Jobs in this state. May be repeated."),
        click.option("--name", help="Jobs of this name."),
        click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Jobs with this tag. May be repeated."),
        click.option("--group", metavar="ID", help="Jobs of this sweep, array, pipeline or schedule."),
    )

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def command(*, states: Any, name: str | None, tags: tuple[str, ...], group: str | None, **given: Any) -> Any:
            wanted = {"states": states or None, "name": name, "tags": _tag_pairs(tags), "group": group}
            return function(wanted=wanted, **given)

        return add(command)

    return decorate


def _tag_pairs(texts: tuple[str, ...]) -> dict[str, str] | None:
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
    if given is not None or ctx.resilient_parsing:
        return given
    if not os.path.lexists(JOB_FILE):
        raise click.UsageError(f"name a file: there is no {JOB_FILE} in the current directory", ctx)
    return JOB_FILE


job_file_argument = click.argument(
    "job_file", metavar="[JOB.yaml]", required=False, type=click.Path(), callback=job_file_here
)


def _complete_setting(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from orc.orchestrator.cli.completion import complete

    return complete(incomplete)


set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=_complete_setting,
    help="Override a key of the job file, like resources.nodes=4. May be repeated.",
)


def open_client(*, reconciler: bool = True) -> JobsClient:
    """Return a client that is closed when the command ends. Raises `LaunchError`.

    It is that of a service where one is configured. Else, where jobs are live, a reconciler is left behind that goes on
    with them, unless *reconciler* is false.
    """
    if login := _login():
        service = open_service(login)
        click.get_current_context().call_on_close(service.close)
        return service
    return _of_ledger(reconciler)


def _login() -> Login | None:
    """Return the login of the service that commands go to; `None` where they go to the ledger. Raises `LaunchError`."""
    from orc.orchestrator.clients import logins

    return logins.configured()


def open_service(login: Login) -> ServiceClient:
    """Return the client of a service, which says when an answer takes long. Raises `LaunchError`."""
    from orc.orchestrator.clients.connecting import service_client

    service = service_client(login)
    service.session.around = lambda: waiting(f"waiting for {login.url}")
    return service


def open_ledger(*, reconciler: bool = True) -> Client:
    """Return the client of the ledger, as `open_client`, for commands that go through no service.

    Raises `NeedsLedger` where a service is configured: the ledger here is not the one that is meant then.
    """
    if login := _login():
        raise _needs_ledger(login.url)
    return _of_ledger(reconciler)


def ask_clusters(
    client: JobsClient, job_ids: Sequence[str], note: str = "shown is what was last known of its jobs"
) -> None:
    """Ask the clusters of jobs what has become of them, and warn about those that do not answer; *note* is added."""
    with waiting(f"asking the clusters about {len(job_ids)} job{'s' if len(job_ids) != 1 else ''}"):
        report = client.refresh(job_ids)
    output.warn_unreachable(report.unreachable, note)


def check_job(path: str, overrides: Sequence[str], cluster: str | None) -> LoadedJob:
    """Return the job in the file *path*, checked as far as this machine can.

    The clusters are the service's where one is configured, and it checks the rest. Raises `LaunchError`.
    """
    if _login():
        from orc.launchers.spec import load_job

        return load_job(path, overrides, cluster=cluster)
    from orc.orchestrator.engine.job_source import load_checked

    return load_checked(path, overrides, cluster=cluster)


def check_jobs(
    path: str, overrides: Sequence[str], cluster: str | None, *, needs_clusters: bool = False
) -> LoadedJob | LoadedGroup:
    """Return the job or the group of jobs in the file *path*; as `check_job`.

    A command that *needs_clusters* cannot do without those of this machine. Raises `LaunchError`.
    """
    if login := _login():
        if needs_clusters:
            raise _needs_ledger(login.url)
        from orc.launchers.spec.groups import load_jobs

        return load_jobs(path, overrides, cluster=cluster)
    from orc.orchestrator.engine.job_source import load_jobs_checked

    return load_jobs_checked(path, overrides, cluster=cluster)


def _needs_ledger(url: str) -> Exception:
    from orc.orchestrator.clients.errors import NeedsLedger

    name = click.get_current_context().command_path
    return NeedsLedger(
        f"`{name}` works on the ledger and the clusters of the machine it runs on, and commands here go to a service",
        where=url,
        hint="run it on the service's machine, or with ORC_SERVICE_URL=local for the ledger of this one",
    )


def _of_ledger(reconciler: bool) -> Client:
    from orc.orchestrator.client import Client

    client = Client(reconciler=reconciler)
    click.get_current_context().call_on_close(client.close)
    if why := client.workspace.ledger.volatile:
        where = client.workspace.ledger.database.url.removeprefix("sqlite:///")
        do = "free some space: jobs go on, what becomes of them is recorded later, retries wait"
        output.warn(Finding("warning", f"the ledger can only be read: {why}", where, do))
    client.session.leave_reconciler()
    return client
