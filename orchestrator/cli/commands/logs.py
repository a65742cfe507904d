"""`orc logs`."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from orc.launchers.attempts.records import LogChunk, LogSelector
from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import MOMENT, following_option, json_option, newest_job_argument, open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import display, waiting
from orc.orchestrator.cli.ui.tail import Cursor, JsonSink, PlainSink, PrefixSink, Selection, Sink, follow
from orc.orchestrator.insight.log_times import LONGEST, NEAR, TIME, UNKNOWN, Clock, lines_of, split_lines

if TYPE_CHECKING:
    from orc.orchestrator.api.logs import Logs
    from orc.orchestrator.views import JobView


@click.command("logs")
@newest_job_argument
@following_option
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
def logs_command(
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
) -> int:
    """Print the logs of JOB (default: the newest), byte for byte; a prefix names the rank.

    Lines of several ranks come in the order of the times that they begin with, where they do; with --follow as they
    come. Of hosts that do not answer a warning says what is missing, and the exit status is 5.

    On a terminal control characters are shown (\\x1b) instead of obeyed, except with --raw.

    With --json each line of output is {"attempt", "rank", "node", "offset", "end", "text"}.
    """
    from orc.orchestrator.api.logs import Logs, list_logs

    client = open_client()
    job_id = client.resolve(job)
    view = client.job(job_id)
    if attempt is not None and attempt > len(view.attempts):
        raise LaunchError(f"there is no attempt {attempt}", where=job_id, hint=f"attempts so far: {len(view.attempts)}")
    number = attempt or len(view.attempts)
    selection = Selection(ranks, nodes, launcher=launcher)
    with waiting(f"looking for the logs of {job_id}"):
        listed = list_logs(client.session, job_id, number) if number else Logs(0, [])
    selectors, silent = selection.of(listed.logs, final=True), _silent(selection, listed)
    if not selectors and not following and not silent:
        raise _no_logs(view, number, listed.logs)
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
            there = {n: list_logs(client.session, job_id, n) for n in followed}
            silent = {host: why for listed in there.values() for host, why in _silent(selection, listed).items()}
            if not silent and not any(selection.of(listed.logs, final=True) for listed in there.values()):
                last = attempt or len(view.attempts)
                raise _no_logs(view, last, there[last].logs if last in there else ())
        elif tail is None and len(selectors) > 1 and have_times(cursor, number, selectors):
            copy_merged(cursor, number, selectors, sink, start=since_offset)
        elif tail is None:
            cursor.copy(number, selectors)
    finally:
        sink.finish()
    silent |= cursor.unreachable
    output.warn_unreachable(silent, _MISSING, "host")
    return int(output.ExitCode.UNREACHABLE if silent else output.ExitCode.OK)


def _silent(selection: Selection, listed: Logs) -> dict[str, str]:
    """Return the hosts that may have logs of *selection* and do not answer, and why."""
    return {} if selection.is_whole(listed.logs) else dict(listed.unreachable)


def _compiled(pattern: str | None) -> re.Pattern[bytes] | None:
    """Return the regular expression. Raises `click.UsageError`."""
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


_MISSING = "its logs are missing here; try again when it answers"
_LOOK = 64 << 10  # bytes of a log in which a time is looked for at all


class LineFilter(Sink):
    """Sink that passes on whole lines: those since a time, and those in which a pattern is found."""

    def __init__(self, inner: Sink, since: float | None = None, pattern: re.Pattern[bytes] | None = None) -> None:
        self._inner = inner
        self._since, self._pattern = since, pattern
        self._rest: dict[tuple[int, LogSelector], LogChunk] = {}
        self._clocks: dict[tuple[int, LogSelector], tuple[Clock, float]] = {}

    def write(self, attempt: int, chunk: LogChunk) -> None:
        """Pass on the lines of *chunk* that are requested; an unfinished one waits for its end."""
        key = (attempt, chunk.selector)
        if before := self._rest.pop(key, None):
            chunk = LogChunk(chunk.selector, before.offset, before.data + chunk.data)
        whole = len(chunk.data) if len(chunk.data) > LONGEST else 0
        whole = chunk.data.rfind(b"\n") + 1 or whole
        if whole < len(chunk.data):
            self._rest[key] = LogChunk(chunk.selector, chunk.offset + whole, chunk.data[whole:])
        self._pass(key, LogChunk(chunk.selector, chunk.offset, chunk.data[:whole]))

    def _pass(self, key: tuple[int, LogSelector], chunk: LogChunk) -> None:
        if not chunk.data:
            return
        if self._since is None and self._pattern is not None and not self._pattern.search(chunk.data):
            return
        clock, at = self._clocks.get(key, (Clock(), UNKNOWN))
        offset = chunk.offset
        for line in chunk.data.splitlines(keepends=True) if b"\r" not in chunk.data else split_lines(chunk.data):
            if self._since is not None:
                known = clock.time_of(line)
                at = at if known is None else known
            # What has no time might be as old or as new as anything: it is shown.
            if (self._since is None or at == UNKNOWN or at >= self._since) and (
                self._pattern is None or self._pattern.search(line)
            ):
                self._inner.write(key[0], LogChunk(chunk.selector, offset, line))
            offset += len(line)
        self._clocks[key] = (clock, at)

    def flush(self) -> None:
        """Show what was passed on."""
        self._inner.flush()

    def finish(self) -> None:
        """Pass on unfinished lines, too, and show everything."""
        for key, chunk in self._rest.items():
            self._pass(key, chunk)
        self._rest.clear()
        self._inner.finish()


def have_times(cursor: Cursor, attempt: int, selectors: Sequence[LogSelector]) -> bool:
    """Return True where one of the logs has times, by its beginning."""
    for selector in selectors:
        beginning = b""
        for chunk in cursor.read(attempt, selector, 0):
            beginning += chunk.data
            if len(beginning) >= _LOOK:
                break
        if any(TIME.search(line, 0, NEAR) for line in beginning[:_LOOK].split(b"\n")):
            return True
    return False


def copy_merged(cursor: Cursor, attempt: int, selectors: Sequence[LogSelector], sink: Sink, *, start: int = 0) -> None:
    """Copy several logs as one in the order of time; lines of one time in the order of *selectors*. Memory is flat."""

    def lines(index: int, selector: LogSelector) -> Iterator[tuple[float, int, int, bytes]]:
        chunks = cursor.read(attempt, selector, start)
        return ((at, index, offset, line) for at, offset, line in lines_of(chunks, start))

    for _, index, offset, line in heapq.merge(*(lines(i, selector) for i, selector in enumerate(selectors))):
        sink.write(attempt, LogChunk(selectors[index], offset, line))
    sink.flush()
