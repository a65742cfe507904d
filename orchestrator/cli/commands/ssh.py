"""`orc ssh`."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import job_argument
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui.display import waiting


@click.command("ssh")
@job_argument
@click.option("--node", type=click.IntRange(0), help="This node. [default: the first]")
@click.option("--rank", type=click.IntRange(0), help="The node of this rank, with its environment.")
def command(job: str, node: int | None, rank: int | None) -> None:
    """Open a shell on a node of a running JOB: in its working copy, with its environment.

    Hosts of an SSH cluster are entered with the real `ssh`, Slurm nodes with `srun --pty`, this machine directly.
    """
    if node is not None and rank is not None:
        raise click.UsageError("give one of --node and --rank", click.get_current_context())
    from orc.launchers.hosts.sessions import on_node
    from orc.orchestrator.cli.commands.exec import become, pick

    client = open_client()
    with waiting(f"looking for the nodes of {job}"):
        chosen = pick(client, job, client.entries(client.resolve(job)), node, rank)
    become(client, on_node(chosen, (), rank=rank, terminal=True))
