"""`orc resubmit`."""

from __future__ import annotations

import functools

import click

from orc.orchestrator.cli.commands.submit import Following, follow_options, reconciler_option, run
from orc.orchestrator.cli.options import job_argument, json_option, set_option
from orc.orchestrator.cli.session import open_client


@click.command("resubmit")
@job_argument
@set_option
@follow_options
@reconciler_option
@json_option
def command(job: str, overrides: tuple[str, ...], follow: Following, reconciler: bool, as_json: bool) -> int:
    """Run JOB again as a new job, from the same code snapshot and specification, as changed with --set.

    For a sweep, an array or a pipeline, submit the unsuccessful jobs once more.
    """
    client = open_client(reconciler=reconciler)
    if "-" in job and client.jobs(group=job, limit=1):
        from orc.orchestrator.cli.commands.groups import retry_group

        if overrides or follow.wanted:
            raise click.UsageError("--set and --follow are for one job", click.get_current_context())
        return retry_group(job, as_json=as_json)
    job_id = client.resolve(job)
    resubmit = functools.partial(client.resubmit, job_id, overrides=overrides)
    return run(client, lambda told: resubmit(on_progress=told), follow, as_json=as_json)
