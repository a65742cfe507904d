"""`orc logs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import MOMENT, json_option, newest_job_argument
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import display, waiting

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from orc.launchers.attempts.logs import LogSelector
    from orc.orchestrator.views import JobView


@click.command("logs")
@newest_job_argument
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the job has ended, over its retries.")
@click.option("--rank", "ranks", type=click.IntRange(0), multiple=True, help="Only this rank. May be repeated.")
@click.option(
    "--node", "nodes", type=click.IntRange(0), multiple=True, help="Output of the agent and the launcher on this node."
)
@click.option("--launcher", is_flag=True, help="Output of the cluster's own launcher: the batch script and srun.")
@click.option("--attempt", type=click.IntRange(1), help="This attempt instead of the newest.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines of each log.")
@click.option("--since-offset", type=click.IntRange(0), default=0, metavar="BYTES", help="Skip the first bytes.")
@click.option("--since", type=MOMENT, metavar="TIME", help="Only lines since: 2026-01-31T12:00, or 10m, 2h ago.")
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that contain this regular expression.")
@click.option("--color/--no-color", "colours", default=None, help="A colour for each rank. [default: on a terminal]")
@click.option("--raw", is_flag=True, help="Print every byte as it is, control characters too, also on a terminal.")
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
    since: float | None,
    pattern: str | None,
    colours: bool | None,
    raw: bool,
    as_json: bool,
) -> None:
    """Print the logs of JOB (default: the newest), byte for byte; a prefix names the rank.

    Lines of several ranks come in the order of the times that they begin with, where they do; with --follow as they
    come.

    On a terminal control characters are shown (\\x1b) instead of obeyed, except with --raw.

    With --json each line of output is {"attempt", "rank", "node", "offset", "end", "text"}.
    """
    from orc.orchestrator.cli.ui.follow import follow
    from orc.orchestrator.cli.ui.log_lines import LineFilter, copy_merged, have_times
    from orc.orchestrator.cli.ui.tail import Cursor, JsonSink, PlainSink, PrefixSink, Selection, Sink

    client = open_client()
    job_id = client.resolve(job)
    view = client.job(job_id)
    if attempt is not None and attempt > len(view.attempts):
        raise LaunchError(f"there is no attempt {attempt}", where=job_id, hint=f"attempts so far: {len(view.attempts)}")
    number = attempt or len(view.attempts)
    selection = Selection(ranks, nodes, launcher=launcher)
    with waiting(f"looking for the logs of {job_id}"):
        existing = client.log_selectors(job_id, attempt=number) if number else []
    selectors = selection.of(existing, final=True)
    if not selectors and not following:
        raise _no_logs(view, number, existing)
    single = selection.single(view.spec) if following else len(selectors) == 1
    coloured = output.coloured() if colours is None else colours
    sink: Sink = JsonSink() if as_json else PlainSink(raw=raw) if single else PrefixSink(raw=raw, colours=coloured)
    if since is not None or pattern is not None:
        sink = LineFilter(sink, since, _compiled(pattern))
    try:
        with display(silent=as_json or not following) as shown:
            cursor = Cursor(client, job_id, sink, since_offset, shown.aside)
            if tail is not None:
                cursor.copy_tail(number, selectors, tail)
            if following:
                view = follow(client, job_id, cursor, selection, shown, first_attempt=number, only=attempt is not None)
        if following:
            followed = range(number or 1, (attempt or len(view.attempts)) + 1)
            there = {n: client.log_selectors(job_id, attempt=n) for n in followed}
            if not any(selection.of(existing, final=True) for existing in there.values()):
                last = attempt or len(view.attempts)
                raise _no_logs(view, last, there.get(last, ()))
        elif tail is None and len(selectors) > 1 and have_times(client, job_id, number, selectors):
            copy_merged(client, job_id, number, selectors, sink, start=since_offset)
        elif tail is None:
            cursor.copy(number, selectors)
    finally:
        sink.finish()


def _compiled(pattern: str | None) -> re.Pattern[bytes] | None:
    """Return the regular expression. Raises `click.UsageError`."""
    import re

    try:
        return re.compile(pattern.encode()) if pattern is not None else None
    except re.error as error:
        raise click.UsageError(
            f"--grep {pattern!r} is no regular expression: {error}", click.get_current_context()
        ) from None


def _no_logs(view: JobView, number: int, existing: Sequence[LogSelector]) -> LaunchError:
    """Return the error for logs that do not exist, beside those of the attempt that do."""
    from orc.orchestrator.insight.sessions import ranges

    if not number and view.ended:
        what, hint = "it ended before it ran: there are no logs", f"`orc status {view.id}` says why"
    elif existing:
        names = {
            "ranks": ranges([log.rank for log in existing if log.rank is not None]),
            "nodes": ranges([log.node for log in existing if log.node is not None]),
        }
        there = [f"of the {plural} {numbers}" for plural, numbers in names.items() if numbers]
        there += ["of the launcher"] if any(log.launcher for log in existing) else []
        what, hint = "there is no such log", f"there are logs {', '.join(there)}"
    else:
        what = "there are no logs yet"
        hint = f"`orc status {view.id}` shows whether it runs; `orc logs -f {view.id}` waits for output"
    return LaunchError(what, where=f"{view.id} attempt {number}" if number else view.id, hint=hint)
