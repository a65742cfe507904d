"""`orc tag`."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import job_argument, output_options
from orc.orchestrator.cli.session import open_client
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import echo


@click.command("tag")
@job_argument
@click.argument("changes", metavar="[KEY=VALUE | KEY-]...", nargs=-1)
@output_options("json", "yaml")
def command(job: str, changes: tuple[str, ...], form: str | None) -> None:
    """Set tags of JOB, remove them with KEY-, and print its tags."""
    wanted: dict[str, str | None] = {}
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals and (not text.endswith("-") or len(text) < 2):
            raise click.UsageError(f"expected KEY=VALUE or KEY-, not {text!r}", click.get_current_context())
        wanted[key if equals else text[:-1]] = value if equals else None
    client = open_client()
    job_id = client.resolve(job)
    view = client.set_tags(job_id, wanted) if wanted else client.job(job_id)
    if not output.document({"id": view.id, "tags": dict(view.tags)}, form):
        for key, value in sorted(view.tags.items()):
            echo(f"{key}={value}")
