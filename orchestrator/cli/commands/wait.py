"""`orc wait`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import SECONDS, jobs_argument, json_option
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.orchestrator.views import JobView


@click.command("wait")
@jobs_argument
@click.option("--timeout", type=SECONDS, metavar="SECONDS", help="Give up after this time: exit status 6.")
@json_option
def command(jobs: tuple[str, ...], timeout: float | None, as_json: bool) -> int:
    """Wait until JOBs have ended. Exit status: 0 all succeeded, 1 one failed, 3 one was cancelled, 6 timed out."""
    from orc.orchestrator.cli.exit_codes import ExitCode, of_states
    from orc.orchestrator.cli.session import open_client
    from orc.orchestrator.cli.ui import jobtext, output
    from orc.orchestrator.cli.ui.display import display

    client = open_client()
    ids = [client.resolve(job) for job in jobs]
    with display(silent=as_json) as shown:

        def on_change(view: JobView) -> None:
            if len(ids) > 1 or not view.ended:  # how the only one ended is printed below
                shown.show(jobtext.headline(view))

        views = client.wait(ids, timeout_s=timeout, on_change=on_change)
    if as_json:
        output.echo_json({"jobs": [view.to_dict() for view in views], "timed_out": not all(v.ended for v in views)})
    else:
        echo("\n".join(jobtext.headline(view) for view in views))
    if not all(view.ended for view in views):
        return int(ExitCode.TIMED_OUT)
    return int(of_states(view.state for view in views))
