"""`orc schema`: JSON Schema of the files that people write, for their editors."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import json_option


@click.command("schema")
@click.argument("kind", metavar="[job|clusters]", type=click.Choice(["job", "clusters"]), default="job")
@json_option
def command(kind: str, as_json: bool) -> None:
    """Print the JSON Schema of job.yaml, or of clusters.yaml; with it editors complete keys and mark mistakes.

    \b
    orc schema > job.schema.json        # and in job.yaml, at the top:
    # yaml-language-server: $schema=job.schema.json
    """
    from orc.launchers.spec.json_schema import SCHEMAS
    from orc.orchestrator.cli.ui.output import echo_json

    del as_json  # it is JSON anyway
    echo_json(SCHEMAS[kind]())
