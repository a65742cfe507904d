"""`orc schema`: JSON Schema of the files that people write, for their editors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo_json

if TYPE_CHECKING:
    from pydantic import BaseModel


@click.command("schema")
@click.argument("kind", metavar="[job|clusters]", type=click.Choice(["job", "clusters"]), default="job")
@json_option
def command(kind: str, as_json: bool) -> None:
    """Print the JSON Schema of job.yaml, or of clusters.yaml; with it editors complete keys and mark mistakes.

    \b
    orc schema > job.schema.json        # and in job.yaml, at the top:
    # yaml-language-server: $schema=job.schema.json
    """
    from orc.launchers.spec.json_schema import clusters_schema, job_schema

    del as_json  # it is JSON anyway
    echo_json(job_schema() if kind == "job" else clusters_schema(_options_models()))


def _options_models() -> dict[str, type[BaseModel]]:
    """Return the models of the options of clusters, of all kinds that have one, those of other packages included."""
    from orc.launchers.backends import backend_class
    from orc.launchers.plugins import BACKENDS

    found = {}
    for kind in BACKENDS.kinds():
        try:
            model = backend_class(kind).options_model
        except LaunchError:  # of a package that cannot be loaded: the use of the kind says why
            continue
        if model is not None:
            found[kind] = model
    return found
