"""`orc stacks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import job_argument, json_option
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, style

if TYPE_CHECKING:
    from orc.orchestrator.insight.sessions import Group


@click.command("stacks")
@job_argument
@click.option("--timeout", type=click.FloatRange(0.1, 600), default=10.0, show_default=True, help="Seconds to wait.")
@json_option
def command(job: str, timeout: float, as_json: bool) -> int:
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
    echo("\n\n".join(text(group) for group in groups) or "no ranks run now")
    for node in found["missing"]:
        echo(f"\nnode {node} gave no answer within {timeout:g} s", err=True)
    for problem in found["problems"]:
        echo(problem, err=True)
    return int(bool(found["missing"]))


def text(group: Group) -> str:
    """Return a group as text: its ranks, then the frames, outermost first as in a traceback."""
    from orc.orchestrator.insight.sessions import ranges

    head = f"rank {group.ranks[0]}" if len(group.ranks) == 1 else f"ranks {ranges(group.ranks)} ({len(group.ranks)})"
    if not group.frames:
        return f"{style(head, bold=True)}\n  {group.error}"
    lines = [f"  {file}:{line} in {function}" for file, line, function in reversed(group.frames)]
    return "\n".join([style(head, bold=True), *lines])
