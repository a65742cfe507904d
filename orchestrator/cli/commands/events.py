"""`orc events`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from orc.orchestrator.cli.options import newest_job_argument, output_options
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import clock, duration, echo
from orc.orchestrator.ledger.lifecycle import Kind


@click.command("events")
@newest_job_argument
@output_options("json", "yaml", "wide")
def command(job: str, form: str | None) -> None:
    """Print the history of JOB (default: the newest), oldest first, one line per event.

    With -o wide the raw data of each event is shown beside the words; --json has all of it.
    """

    client = open_client()
    events = client.events(client.resolve(job))
    if output.document({"events": [event.to_dict() for event in events]}, form):
        return
    header, rows = ["AT", "ATTEMPT", "WHAT"], []
    if form == "wide":
        header[2:2] = ["EVENT"]
        header.append("DATA")
    for event in events:
        row = [
            output.clock(event.at),
            f"a{event.attempt}" if event.attempt else "",
            sentence(str(event.kind), event.data),
        ]
        if form == "wide":
            row[2:2] = [str(event.kind)]
            row.append(" ".join(f"{k}={v}" for k, v in event.data.items() if v not in (None, "", {}, [])))
        rows.append(row)
    echo(output.table(header, rows, fit=form != "wide"))


Data = Mapping[str, Any]


def _with(text: str, key: str = "reason") -> Callable[[Data], str]:
    """Return the sentence *text*, with what the event has as *key* behind a colon."""
    return lambda data: f"{text}: {_one_line(data[key])}" if data.get(key) else text


def _hosts(text: str, otherwise: str) -> Callable[[Data], str]:
    return lambda data: f"{text} {', '.join(data['hosts'])}" if data.get("hosts") else otherwise


def _ended(text: str) -> Callable[[Data], str]:
    def say(data: Data) -> str:
        cause = str(data.get("cause") or "").replace("_", " ")
        parts = [text + (f" ({cause})" if cause and cause not in text else "")]
        if data.get("reason"):
            parts.append(f": {_one_line(data['reason'])}")
        if data.get("failed_hosts"):
            parts.append(f"; to blame: {', '.join(data['failed_hosts'])}")
        return "".join(parts)

    return say


def _queued(data: Data) -> str:
    source = str(data.get("source") or "")
    origin = f" again, as {source.removeprefix('job:')} was" if source.startswith("job:") else ""
    return f"submitted{origin} to {data.get('cluster')}" + (f" from {source}" if source and not origin else "")


def _retry(data: Data) -> str:
    at = data.get("at")
    cause = str(data.get("cause") or "").replace("_", " ")
    why = f" after {cause}" if cause else ""
    why += f" ({_one_line(data['reason'])})" if data.get("reason") else ""
    return f"another attempt follows{why}" + (f", not before {clock(at)}" if isinstance(at, (int, float)) else "")


def _requeued(data: Data) -> str:
    times = data.get("restarts")
    why = f": {_one_line(data['reason'])}" if data.get("reason") else ""
    return "put back into its queue by the cluster" + (f", for the {times}. time" if times else "") + why


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
    if kind in _SAY:
        return _SAY[kind](data)
    return " ".join([kind, *(f"{key}={value}" for key, value in data.items() if value not in (None, "", {}, []))])


def _one_line(text: object) -> str:
    return str(text).partition("\n")[0].removesuffix(":")
