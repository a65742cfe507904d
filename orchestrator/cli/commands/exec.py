"""`orc exec`, `orc ssh`: a program, or a shell, on the nodes of a running job."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import job_argument
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo
from orc.orchestrator.ledger.records import JobSize

if TYPE_CHECKING:
    from orc.launchers.backends.base import NodeEntry
    from orc.orchestrator.clients.surface import JobsClient

_NOT_RUN = 125


@click.command("exec")
@job_argument
@click.option("--node", type=click.IntRange(0), help="On this node. [default: the first]")
@click.option("--rank", type=click.IntRange(0), help="On the node of this rank, with its environment.")
@click.option("--all", "everywhere", is_flag=True, help="On all nodes at once; lines begin with the node's name.")
@click.argument("program", nargs=-1, required=True, metavar="-- PROGRAM [ARG]...")
def exec_(job: str, node: int | None, rank: int | None, everywhere: bool, program: tuple[str, ...]) -> int:
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
def ssh(job: str, node: int | None, rank: int | None) -> None:
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
