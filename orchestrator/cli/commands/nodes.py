"""Commands on the nodes of running jobs: `orc exec`, `orc ssh`, `orc stacks`, `orc top`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from orc.launchers.control_characters import escape_controls
from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import job_argument, json_option, open_client
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, size, style
from orc.orchestrator.ledger.records import JobSize

if TYPE_CHECKING:
    from orc.launchers.backends.base import NodeEntry
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.insight.sessions import Group, Sample


_NOT_RUN = 125


@click.command("exec")
@job_argument
@click.option("--node", type=click.IntRange(0), help="On this node. [default: the first]")
@click.option("--rank", type=click.IntRange(0), help="On the node of this rank, with its environment.")
@click.option("--all", "everywhere", is_flag=True, help="On all nodes at once; lines begin with the node's name.")
@click.argument("program", nargs=-1, required=True, metavar="-- PROGRAM [ARG]...")
def exec_command(job: str, node: int | None, rank: int | None, everywhere: bool, program: tuple[str, ...]) -> int:
    """Run PROGRAM beside a running JOB: on its node, in its working copy, with its environment.

    The exit status is the program's; 125 when it could not be run there.
    """
    if (node is not None) + (rank is not None) + everywhere > 1:
        raise click.UsageError("give one of --node, --rank and --all", click.get_current_context())
    from orc.launchers.hosts.sessions import on_node

    client = open_client()
    with waiting(f"looking for the nodes of {job}"):
        entries = client.entries(client.resolve(job))
    if everywhere:
        return _everywhere(entries, program)
    chosen = pick(client, job, entries, node, rank)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return become(client, on_node(chosen, program, rank=rank, terminal=terminal))


def pick(client: JobsClient, job: str, entries: Sequence[NodeEntry], node: int | None, rank: int | None) -> NodeEntry:
    """Return the node that is meant. Raises `LaunchError` when the job has no such one."""
    number = node or 0
    if rank is not None:
        number = rank // JobSize.of(client.job(client.resolve(job)).spec).ranks_per_node
    if number >= len(entries):
        what = f"rank {rank}" if rank is not None else f"node {number}"
        raise LaunchError(f"there is no {what}", where=job, hint=f"the attempt has {len(entries)} nodes")
    return entries[number]


def become(client: JobsClient, argv: Sequence[str]) -> NoReturn:
    """Replace this process by *argv*. Raises `LaunchError` when that cannot be."""
    client.close()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606 - on purpose: no shell reads this
    except OSError as error:
        raise LaunchError(f"{argv[0]}: {error.strerror}", hint=f"orc needs {argv[0]} to get there") from None


def _everywhere(entries: Sequence[NodeEntry], program: Sequence[str]) -> int:
    """On all nodes; the highest exit status."""
    import subprocess
    import threading

    from orc.launchers.hosts.sessions import on_node
    from orc.orchestrator.cli.ui.tail import writer

    lock, out = threading.Lock(), writer(sys.stdout.buffer)
    statuses: list[int] = []

    def run(entry: NodeEntry) -> None:
        argv = on_node(entry, program)
        prefix = f"[node {entry.node}] ".encode()
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            echo(f"{prefix.decode()}{argv[0]}: {error.strerror}; orc needs it to get there", err=True)
            statuses.append(_NOT_RUN)
            return
        assert process.stdout is not None
        for line in process.stdout:
            with lock:
                out.write(prefix + line.rstrip(b"\n") + b"\n")
                out.flush()
        statuses.append(process.wait())

    threads = [threading.Thread(target=run, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max((128 - status if status < 0 else status for status in statuses), default=0)


@click.command("ssh")
@job_argument
@click.option("--node", type=click.IntRange(0), help="This node. [default: the first]")
@click.option("--rank", type=click.IntRange(0), help="The node of this rank, with its environment.")
def ssh_command(job: str, node: int | None, rank: int | None) -> None:
    """Open a shell on a node of a running JOB: in its working copy, with its environment.

    Hosts of an SSH cluster are entered with the real `ssh`, Slurm nodes with `srun --pty`, this machine directly.
    """
    if node is not None and rank is not None:
        raise click.UsageError("give one of --node and --rank", click.get_current_context())
    from orc.launchers.hosts.sessions import on_node

    client = open_client()
    with waiting(f"looking for the nodes of {job}"):
        chosen = pick(client, job, client.entries(client.resolve(job)), node, rank)
    become(client, on_node(chosen, (), rank=rank, terminal=True))


@click.command("stacks")
@job_argument
@click.option("--timeout", type=click.FloatRange(0.1, 600), default=10.0, show_default=True, help="Seconds to wait.")
@json_option
def stacks_command(job: str, timeout: float, as_json: bool) -> int:
    """Show the stacks of the ranks of a running JOB: ranks with equal stacks together, the odd rank first.

    Nothing is stopped. Python's own faulthandler answers; where a rank hangs outside Python, py-spy does if the node
    has it. Exit status 1 when some node gave no answer.
    """
    from orc.orchestrator.insight import sessions

    client = open_client()
    job_id = client.resolve(job)
    if client.address:
        client.entries(job_id)  # says why not, and where it can be done
    with waiting(f"asking the cluster of {job_id}"):
        client.refresh([job_id])
    if (view := client.job(job_id)).ended:
        raise LaunchError(f"no ranks run: {jobtext.headline(view)}", hint=f"`orc status {job_id}` says more")
    with waiting("asking the ranks for their stacks"):
        found = sessions.stacks(client.entries(job_id), timeout)
    groups = sessions.grouped(found["answers"])
    if as_json:
        rows = [{"ranks": list(g.ranks), "frames": [list(f) for f in g.frames], "error": g.error} for g in groups]
        output.echo_json({"job": job_id, "groups": rows, **found})
        return int(bool(found["missing"]))
    echo("\n\n".join(stack_text(group) for group in groups) or "no ranks run now")
    for node in found["missing"]:
        echo(f"\nnode {node} gave no answer within {timeout:g} s", err=True)
    for problem in found["problems"]:
        echo(problem, err=True)
    return int(bool(found["missing"]))


def stack_text(group: Group) -> str:
    """Return a group as text: its ranks, then the frames, outermost first as in a traceback."""
    from orc.orchestrator.insight.sessions import ranges

    head = f"rank {group.ranks[0]}" if len(group.ranks) == 1 else f"ranks {ranges(group.ranks)} ({len(group.ranks)})"
    if not group.frames:
        return f"{style(head, bold=True)}\n  {group.error}"
    lines = [f"  {file}:{line} in {function}" for file, line, function in reversed(group.frames)]
    return "\n".join([style(head, bold=True), *lines])


HEADER = (
    "JOB", "NODE", "HOST", "STATE", "CPU", "LOAD", "MEMORY", "GPU",
    "RANKS", "RANK CPU", "RANK MEM", "RANK GPU MEM", "STEP", "STEP/S",
)  # fmt: skip


@click.command("top")
@click.option("--job", "jobs", multiple=True, metavar="JOB", help="Only this job. May be repeated.")
@click.option("--interval", type=click.FloatRange(0.2, 3600), default=2.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="One measurement of each node, then end.")
@json_option
def top_command(jobs: tuple[str, ...], interval: float, once: bool, as_json: bool) -> int:
    """Show the load of the nodes of running jobs: processors, memory, GPUs, ranks, training speed.

    With --json, one object per measurement and line. Ctrl-C ends it.
    """
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
    """Return the ids of the jobs that run now."""
    states = ("SUBMITTING", "PENDING", "RUNNING")
    with waiting("asking the clusters which jobs run"):
        client.refresh([row.id for row in client.jobs(states=states, limit=100)])
    return [row.id for row in client.jobs(states=("RUNNING",), limit=100)]


def _plain(sampling: Any, once: bool, as_json: bool, interval: float) -> int:
    """Print lines of JSON, or a table per round; with *once* the last of each node.

    Return the exit status: 1 where the last measurement of a node has failed.
    """
    newest: dict[tuple[str, int], Sample] = {}
    failed: dict[tuple[str, int], bool] = {}

    def show() -> None:
        samples = [newest[key] for key in sorted(newest)]
        if as_json:
            for sample in samples:
                output.echo_json_line(sample.to_dict())
        else:
            echo(output.table(HEADER, list(map(load_row, samples))) + ("" if once else "\n"))

    while not sampling.ended:
        sample = sampling.next(interval + 30.0)
        if sample is None:
            continue
        node = (sample.job, sample.node)
        again = node in newest
        newest[node], failed[node] = sample, bool(sample.error)
        if not once and (again or as_json):
            show()
            newest.clear()
    if once:
        show()
    return int(any(failed.values()))


def _live(sampling: Any, interval: float) -> int:
    """Draw a table again and again; return the exit status."""
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

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
            for key in sorted(newest):
                table.add_row(*(Text(escape_controls(cell)) for cell in load_row(newest[key])))
            screen.update(table, refresh=True)
    return int(any(sample.error for sample in newest.values()))


def load_row(sample: Sample) -> tuple[str, ...]:
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
