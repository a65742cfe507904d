"""`orc wait`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.orchestrator.cli.options import SECONDS, job_ids, optional_jobs_argument, output_options
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import jobtext, output
from orc.orchestrator.cli.ui.display import display
from orc.orchestrator.cli.ui.output import echo
from orc.orchestrator.cli.ui.reporting import ExitCode, of_states

if TYPE_CHECKING:
    from orc.orchestrator.views import JobView


@click.command("wait")
@optional_jobs_argument
@click.option("--timeout", type=SECONDS, metavar="SECONDS", help="Give up after this time: exit status 6.")
@click.option("--bell", is_flag=True, help="Ring when the jobs have ended, in the terminal and on the desktop.")
@output_options("json", "yaml", "name")
def command(jobs: tuple[str, ...], timeout: float | None, bell: bool, form: str | None) -> int:
    """Wait until JOBs have ended. [default: the newest]

    Exit status: 0 all succeeded, 1 a job failed, 3 a job was cancelled, 6 timed out.
    """
    client = open_client()
    ids = job_ids(client, jobs or ("@last",))
    with display(silent=form is not None) as shown:

        def on_change(view: JobView) -> None:
            if len(ids) > 1 or not view.ended:  # how the only one ended is printed below
                shown.show(jobtext.headline(view))

        views = client.wait(ids, timeout_s=timeout, on_change=on_change)
    if bell:
        from orc.orchestrator.cli.ui.display import ring

        ring("orc", [jobtext.headline(view) for view in views])
    found = {"jobs": [view.to_dict() for view in views], "timed_out": not all(v.ended for v in views)}
    if form == "name":
        echo("\n".join(view.id for view in views))
    elif not output.document(found, form):
        echo("\n".join(jobtext.headline(view) for view in views))
    if not all(view.ended for view in views):
        return int(ExitCode.TIMED_OUT)
    return int(of_states(view.state for view in views))
