"""`orc logs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import json_option, newest_job_argument

if TYPE_CHECKING:
    from orc.launchers.errors import LaunchError
    from orc.orchestrator.views import JobView


@click.command("logs")
@newest_job_argument
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the job has ended, over its retries.")
@click.option("--rank", "ranks", type=click.IntRange(0), multiple=True, help="Only this rank. May be repeated.")
@click.option(
    "--node", "nodes", type=click.IntRange(0), multiple=True, help="The agent and launcher output of this node."
)
@click.option("--launcher", is_flag=True, help="What the cluster's own launcher printed: the batch script and srun.")
@click.option("--attempt", type=click.IntRange(1), help="Of this attempt instead of the newest.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines of each log.")
@click.option("--since-offset", type=click.IntRange(0), default=0, metavar="BYTES", help="Skip the first bytes.")
@click.option("--raw", is_flag=True, help="On a terminal, too: every byte as it is, control characters included.")
@json_option
def command(
    job: str,
    following: bool,
    ranks: tuple[int, ...],
    nodes: tuple[int, ...],
    launcher: bool,
    attempt: int | None,
    tail: int | None,
    since_offset: int,
    raw: bool,
    as_json: bool,
) -> None:
    """Print the logs of JOB, the newest unless given, byte for byte; several ranks are told apart by a prefix.

    On a terminal control characters are shown (\\x1b) instead of obeyed, except with --raw.

    With --json each line of output is {"attempt", "rank", "node", "offset", "end", "text"}.
    """
    from orc.launchers.errors import LaunchError
    from orc.orchestrator.cli.session import open_client
    from orc.orchestrator.cli.ui.display import display
    from orc.orchestrator.cli.ui.follow import follow
    from orc.orchestrator.cli.ui.tail import Cursor, JsonSink, PlainSink, PrefixSink, Selection

    client = open_client()
    job_id = client.resolve(job)
    view = client.job(job_id)
    if attempt is not None and attempt > len(view.attempts):
        raise LaunchError(f"there is no attempt {attempt}", where=job_id, hint=f"attempts so far: {len(view.attempts)}")
    number = attempt or len(view.attempts)
    selection = Selection(ranks, nodes, launcher=launcher)
    selectors = selection.of(client.log_selectors(job_id, attempt=number), final=True) if number else []
    if not selectors and not following:
        raise _no_logs(view, number, bool(ranks or nodes or launcher))
    single = selection.single(view.spec) if following else len(selectors) == 1
    sink = JsonSink() if as_json else PlainSink(raw=raw) if single else PrefixSink(raw=raw)
    try:
        with display(silent=as_json or not following) as shown:
            cursor = Cursor(client, job_id, sink, since_offset, shown.aside)
            if tail is not None:
                cursor.copy_tail(number, selectors, tail)
            if following:
                view = follow(client, job_id, cursor, selection, shown, first_attempt=number, only=attempt is not None)
        if following:
            followed = range(number or 1, (attempt or len(view.attempts)) + 1)
            if not any(selection.of(client.log_selectors(job_id, attempt=n), final=True) for n in followed):
                raise _no_logs(view, attempt or len(view.attempts), bool(ranks or nodes or launcher))
        elif tail is None:
            cursor.copy(number, selectors)
    finally:
        sink.finish()


def _no_logs(view: JobView, number: int, chosen: bool) -> LaunchError:
    """Return the error for logs that do not exist."""
    from orc.launchers.errors import LaunchError

    if not number and view.ended:
        what, hint = "it ended before it ran: there are no logs", f"`orc status {view.id}` says why"
    else:
        what = "there is no such log" if chosen else "there are no logs yet"
        hint = f"`orc status {view.id}` shows whether it runs; `orc logs -f {view.id}` waits for output"
    return LaunchError(what, where=f"{view.id} attempt {number}" if number else view.id, hint=hint)
