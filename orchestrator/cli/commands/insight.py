"""Commands that look deeper: `orc events`, `orc diff`, `orc cost`, `orc queue`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import MOMENT, cluster_option_for, newest_job_argument, open_client, output_options
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.jobtext import first_line
from orc.orchestrator.cli.ui.output import clock, duration, echo
from orc.orchestrator.ledger.lifecycle import Kind

if TYPE_CHECKING:
    from orc.launchers.backends.base import QueueReport


@click.command("events")
@newest_job_argument
@output_options("json", "yaml", "wide")
def events_command(job: str, form: str | None) -> None:
    """Print the history of JOB (default: the newest), oldest first, one line per event.

    With -o wide the raw data of each event is shown beside the words; --json has all of it.
    """
    client = open_client()
    events = client.events(client.resolve(job))
    if output.document({"events": [event.to_dict() for event in events]}, form):
        return
    header, rows = ["AT", "ATTEMPT", "WHAT"], []
    for event in events:
        attempt = f"a{event.attempt}" if event.attempt else ""
        rows.append([output.clock(event.at), attempt, sentence(str(event.kind), event.data)])
    if form == "wide":
        header = ["AT", "ATTEMPT", "EVENT", "WHAT", "DATA"]
        rows = [[*row[:2], str(event.kind), row[2], _data(event.data)] for row, event in zip(rows, events, strict=True)]
    echo(output.table(header, rows, fit=form != "wide"))


Data = Mapping[str, Any]


def _with(text: str, key: str = "reason") -> Callable[[Data], str]:
    """Return the sentence *text*, with what the event has as *key* behind a colon."""
    return lambda data: f"{text}: {first_line(str(data[key]))}" if data.get(key) else text


def _hosts(text: str, otherwise: str) -> Callable[[Data], str]:
    return lambda data: f"{text} {', '.join(data['hosts'])}" if data.get("hosts") else otherwise


def _ended(text: str) -> Callable[[Data], str]:
    def say(data: Data) -> str:
        cause = str(data.get("cause") or "").replace("_", " ")
        said = _with(text + (f" ({cause})" if cause and cause not in text else ""))(data)
        return f"{said}; to blame: {', '.join(data['failed_hosts'])}" if data.get("failed_hosts") else said

    return say


def _queued(data: Data) -> str:
    source = str(data.get("source") or "")
    origin = f" again, as {source.removeprefix('job:')} was" if source.startswith("job:") else ""
    return f"submitted{origin} to {data.get('cluster')}" + (f" from {source}" if source and not origin else "")


def _retry(data: Data) -> str:
    at = data.get("at")
    cause = str(data.get("cause") or "").replace("_", " ")
    why = f" after {cause}" if cause else ""
    why += f" ({first_line(data['reason'])})" if data.get("reason") else ""
    return f"another attempt follows{why}" + (f", not before {clock(at)}" if isinstance(at, (int, float)) else "")


def _requeued(data: Data) -> str:
    times = data.get("restarts")
    return _with("put back into its queue by the cluster" + (f", for the {times}. time" if times else ""))(data)


def _duplicate(data: Data) -> str:
    if data.get("cancelled"):
        return _with("a copy came after it was given up, and was told to end", "native_id")(data)
    return _with("a second copy was sent, which does not run", "native_id")(data)


def _cancel(data: Data) -> str:
    grace = data.get("grace_s")
    return "cancellation asked for" + (f", with {duration(grace)} of grace" if grace is not None else "")


_SAY: Mapping[str, Callable[[Data], str]] = {
    Kind.QUEUED: _queued,
    Kind.WAITING: _with("queued"),
    Kind.PREPARED: _hosts("made ready for", "made ready"),
    Kind.PLACED: _hosts("given the hosts", "given hosts"),
    Kind.SUBMITTING: lambda data: "being sent to the cluster",
    Kind.ACCEPTED: _with("accepted by the cluster", "native_id"),
    Kind.AMBIGUOUS: _with("cut off while it was sent; the cluster may or may not have it"),
    Kind.NOT_FOUND: lambda data: "looked for on the cluster and not seen so far",
    Kind.ADOPTED: _with("found on the cluster", "native_id"),
    Kind.RELEASED: _with("the cluster has certainly not got it; it is sent again"),
    Kind.RUNNING: _hosts("running on", "running"),
    Kind.REQUEUED: _requeued,
    Kind.STALLED: _with("the training has stalled"),
    Kind.CANCEL_SENT: lambda data: "the cluster was told to stop it",
    Kind.DUPLICATE: _duplicate,
    Kind.SUCCEEDED: lambda data: "ended well",
    Kind.FAILED: _ended("failed"),
    Kind.PREEMPTED: _ended("preempted"),
    Kind.LOST: _ended("lost"),
    Kind.CANCELLED: _ended("cancelled"),
    Kind.CANCEL_REQUESTED: _cancel,
    Kind.POLL_ERROR: _with("the cluster could not be asked"),
    Kind.RETRY: _retry,
    Kind.JOB_SUCCEEDED: lambda data: "the job has succeeded",
    Kind.JOB_FAILED: _ended("the job has failed"),
    Kind.JOB_CANCELLED: _ended("the job was cancelled"),
}


def sentence(kind: str, data: Data) -> str:
    """Return the sentence that describes an event; a *kind* of a newer orc as its name and data."""
    return _SAY[kind](data) if kind in _SAY else f"{kind} {_data(data)}".rstrip()


def _data(data: Data) -> str:
    return " ".join(f"{key}={value}" for key, value in data.items() if value not in (None, "", {}, []))


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--stat", is_flag=True, help="For the code, only the names of the files.")
@output_options("json", "yaml")
def diff_command(a: str, b: str, stat: bool, form: str | None) -> None:
    """Show what differs between two jobs: specification, environment, code, outcome and metrics."""
    client = open_client()
    found = client.diff(client.resolve(a), client.resolve(b))
    if not output.document(found, form):
        echo("\n".join(_lines(found, stat)))


def _lines(found: Mapping[str, Any], stat: bool) -> Iterator[str]:
    first, second = found["jobs"]
    yield output.style(f"{first} .. {second}", bold=True)
    for title in ("spec", "environment"):
        yield from _section(title, list(_keys(found[title])))
    yield from _section("code", list(_code(found["code"], stat)))
    yield from _section("outcome", [_outcome(found["outcome"])])
    yield from _section("metrics", list(_metrics(found["metrics"], first, second)))


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield ""
    yield output.style(title, bold=True)
    yield from lines or ["  the same"]


def _keys(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for entry in entries:
        yield f"  {entry['key']}"
        for side, sign, colour in (("a", "-", "red"), ("b", "+", "green")):
            if side in entry:
                yield output.style(f"    {sign} {_value(entry[side])}", fg=colour)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _code(code: Mapping[str, Any], stat: bool) -> Iterator[str]:
    if code["missing"]:
        yield f"  differs; {code['missing']}"
    for file in code["files"]:
        note = f" ({file['note']})" if file.get("note") else ""
        yield f"  {file['change']:8} {file['path']}{note}"
    for file in () if stat else code["files"]:
        for line in file["diff"].splitlines():
            colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
            yield output.style(line, fg=colour) if colour else line


def _outcome(sides: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        ["state", *(output.state(side["state"]) for side in sides)],
        ["reason", *(first_line(side["reason"]) or "-" for side in sides)],
        ["cluster", *(side["cluster"] for side in sides)],
        ["attempts", *(str(side["attempts"]) for side in sides)],
        ["ended by", *(", ".join(side["causes"]) or "-" for side in sides)],
        ["took", *(output.duration(side["duration_s"]) for side in sides)],
        ["hosts", *(",".join(side["hosts"]) or "-" for side in sides)],
    ]
    return output.table(["", *(side["job"] for side in sides)], rows)


def _metrics(metrics: Mapping[str, Any], first: str, second: str) -> Iterator[str]:
    for job, why in zip((first, second), metrics["missing"], strict=True):
        if why:
            yield f"  {job}: {why}"
    rows = []
    for entry in metrics["values"]:
        cells = [entry["name"]]
        for what in ("last", "min", "max"):
            cells += ["-" if not entry[side] else f"{entry[side][what]:.4g}" for side in ("a", "b")]
        rows.append(cells)
    if rows:
        header = ["", *(f"{what} {side}" for what in ("LAST", "MIN", "MAX") for side in ("A", "B"))]
        yield output.table(header, rows)
    elif not any(metrics["missing"]):
        yield "  neither has measured anything"


@click.command("cost")
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@click.option(
    "--by", default="job", show_default=True, metavar="WHAT", help="job, user, project, cluster, day, tag:KEY."
)
@click.option("--user", "owner", metavar="NAME", help="Only jobs of this user.")
@click.option("--since", type=MOMENT, metavar="TIME", help="Only attempts after it: 2026-01-31, or 7d, 12h ago.")
@click.option("--until", type=MOMENT, metavar="TIME", help="Only attempts before it.")
@output_options("json", "yaml")
def cost_command(
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
    rows = [_cost_row(group["key"] or "-", group) for group in found["groups"]]
    if len(rows) > 1:
        rows.append(_cost_row("total", found["total"]))
    echo(output.table(header, rows))


def _cost_row(key: str, group: Mapping[str, Any]) -> list[str]:
    hours = [f"{group[what]:.2f}{'+' if group['running'] else ''}" for what in ("node_hours", "gpu_hours")]
    known = [f"{value:.2f} {currency}" for currency, value in (group["cost"] or {}).items()]
    if group["unpriced_node_hours"] or not known:
        known.append(f"unknown ({group['unpriced_node_hours']:.2f} node hours)" if known else "unknown")
    return [key, str(group["jobs"]), *hours, " + ".join(known)]


@click.command("queue")
@cluster_option_for("This cluster. [default: all with a queue]")
@output_options("json", "yaml")
def queue_command(cluster: str | None, form: str | None) -> int:
    """Show the queues of clusters: partitions, and of our jobs the reason why they wait and the expected start.

    Exit status 1 when a cluster did not answer; the others are shown.
    """
    from orc.orchestrator.views import encode

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
    found = [{"cluster": name, **encode(report)} for name, report in reports.items()]
    found += [{"cluster": name, "error": str(error)} for name, error in errors.items()]
    if not output.document({"clusters": found}, form):
        echo("\n\n".join(_queue_text(name, report, len(names) > 1) for name, report in reports.items()))
        for silent in errors.values():
            echo(f"\n{silent}", err=True)
    return int(bool(errors))


def _queue_text(name: str, report: QueueReport, titled: bool) -> str:
    from orc.launchers.ids import AttemptId

    partitions = [
        (f"{p.name}{'*' if p.default else ''}", p.state, f"{p.idle_nodes}/{p.nodes}", f"{p.idle_cpus}/{p.cpus}",
         output.duration(p.limit_s) if p.limit_s is not None else "none", ", ".join(p.resources) or "-")
        for p in report.partitions
    ]  # fmt: skip
    parts = [output.table(("PARTITION", "STATE", "IDLE NODES", "IDLE CORES", "TIME LIMIT", "GRES"), partitions)]
    jobs = [
        (AttemptId.from_marker(job.marker).job, job.native_id, job.state, job.partition, str(job.nodes),
         _start(job.starts_at), job.reason or "-")
        for job in report.jobs
    ]  # fmt: skip
    header = ("JOB", "NUMBER THERE", "STATE", "PARTITION", "NODES", "STARTS", "REASON")
    parts.append(output.table(header, jobs) if jobs else "none of our jobs is there")
    return "\n\n".join([*([f"{name}:"] if titled else []), *parts])


def _start(at: float | None) -> str:
    if at is None:
        return "unknown"
    return output.clock(at) if at <= time.time() else f"{output.clock(at)} (in {output.duration(at - time.time())})"
