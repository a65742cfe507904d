"""`orc top`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, size

if TYPE_CHECKING:
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.insight.sessions import Sample

HEADER = (
    "JOB",
    "NODE",
    "HOST",
    "STATE",
    "CPU",
    "LOAD",
    "MEMORY",
    "GPU",
    "RANKS",
    "RANK CPU",
    "RANK MEM",
    "RANK GPU MEM",
    "STEP",
    "STEP/S",
)


@click.command("top")
@click.option("--job", "jobs", multiple=True, metavar="JOB", help="Only this job. May be repeated.")
@click.option("--interval", type=click.FloatRange(0.2, 3600), default=2.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="One measurement of each node, then end.")
@json_option
def command(jobs: tuple[str, ...], interval: float, once: bool, as_json: bool) -> int:
    """Show the load of the nodes of running jobs: processors, memory, GPUs, ranks, training speed.

    With --json, one object per measurement and line. Ctrl-C ends it.
    """
    import sys

    from orc.orchestrator.insight.sessions import Sampling

    client = open_client()
    ids = [client.resolve(job) for job in jobs] or running(client)
    entries = [(job_id, entry) for job_id in ids for entry in client.entries(job_id)]
    if not entries:
        raise LaunchError("no job is running", hint="`orc list` shows the jobs")
    live = sys.stdout.isatty() and not (once or as_json)
    # Two measurements, because speeds are differences.
    with Sampling(entries, min(interval, 1.0) if once else interval, 2 if once else 0) as sampling:
        return _live(sampling, interval) if live else _plain(sampling, once, as_json, interval)


def running(client: JobsClient) -> list[str]:
    """Ids of the jobs that run now."""
    states = ("SUBMITTING", "PENDING", "RUNNING")
    with waiting("asking the clusters which jobs run"):
        client.refresh([row.id for row in client.jobs(states=states, limit=100)])
    return [row.id for row in client.jobs(states=("RUNNING",), limit=100)]


def _plain(sampling: Any, once: bool, as_json: bool, interval: float) -> int:
    """Lines of JSON, or a table per round; with *once* the last of each node."""
    newest: dict[tuple[str, int], Sample] = {}
    while not sampling.ended:
        sample = sampling.next(interval + 30.0)
        if sample is None:
            continue
        key = (sample.job, sample.node)
        again = key in newest
        newest[key] = sample
        if once:
            continue
        if as_json:
            output.echo_json_line(sample.to_dict())
        elif again:
            echo(output.table(HEADER, [row(s) for s in ordered(newest)]) + "\n")
            newest.clear()
    if once and as_json:
        for sample in ordered(newest):
            output.echo_json_line(sample.to_dict())
    elif once:
        echo(output.table(HEADER, [row(sample) for sample in ordered(newest)]))
    return int(any(sample.error for sample in newest.values()))


def _live(sampling: Any, interval: float) -> int:
    """Return a table that is drawn again and again."""
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from orc.launchers.control_characters import escape_controls

    newest: dict[tuple[str, int], Sample] = {}
    with Live(auto_refresh=False, transient=False) as screen:
        while not sampling.ended:
            sample = sampling.next(interval)
            if sample is None:
                continue
            newest[sample.job, sample.node] = sample
            table = Table(box=None, pad_edge=False, header_style="bold")
            for name in HEADER:
                table.add_column(name, no_wrap=True)
            for one in ordered(newest):
                table.add_row(*(Text(escape_controls(cell)) for cell in row(one)))
            screen.update(table, refresh=True)
    return int(any(sample.error for sample in newest.values()))


def ordered(newest: Mapping[tuple[str, int], Sample]) -> Sequence[Sample]:
    """By job and node."""
    return [newest[key] for key in sorted(newest)]


def row(sample: Sample) -> tuple[str, ...]:
    """Return a node as texts, in the order of `HEADER`. Pure."""
    data = sample.data
    if sample.error:
        return (sample.job, str(sample.node), sample.host, sample.error, *[""] * (len(HEADER) - 4))
    ranks = [rank for rank in data["ranks"] if rank["rank"] is not None]
    return (
        sample.job,
        str(sample.node),
        sample.host,
        data["state"] or "-",
        f"{data['cpu_percent']:.0f}% of {data['cpus']}",
        f"{data['load']:.1f}",
        f"{size(data['memory_used'])} of {size(data['memory_total'])}",
        _gpus(data["gpus"]),
        str(len(ranks)),
        f"{sum(rank['cpu_percent'] for rank in ranks):.0f}%",
        size(sum(rank["rss"] for rank in ranks)),
        _device_memory(ranks),
        str(data["progress"].get("step", "-")),
        "-" if sample.step_s is None else f"{sample.step_s:g}",
    )


def _device_memory(ranks: Sequence[Mapping[str, Any]]) -> str:
    """``51.2 GB of 60.0 GB, peak 71.3 GB``: taken by tensors, held by the allocator, and the most that was taken, of
    the rank that has taken most.
    """
    told = [rank for rank in ranks if "memory_peak" in rank]
    if not told:
        return "-"
    fullest = max(told, key=lambda rank: int(rank["memory_peak"]))
    allocated, reserved, peak = (size(fullest[f"memory_{what}"]) for what in ("allocated", "reserved", "peak"))
    return f"{allocated} of {reserved}, peak {peak}"


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> str:
    """``8: 97% 63 GiB`` (how many, their mean load, the memory in use)."""
    if not gpus:
        return "-"
    load = sum(gpu["utilisation"] or 0 for gpu in gpus) / len(gpus)
    return f"{len(gpus)}: {load:.0f}% {sum(gpu['memory_used_mib'] or 0 for gpu in gpus) / 1024:.0f} GiB"
