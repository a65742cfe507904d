"""`orc version`."""

from __future__ import annotations

import click

from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo_result


def version() -> str:
    """Return the installed version of orc."""
    import importlib.metadata

    return importlib.metadata.version("orc-launch")


@click.command("version")
@json_option
def command(as_json: bool) -> None:
    """Print the versions of orc, Python and torch (when torch is installed)."""
    import importlib.metadata
    import platform

    try:
        torch: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    echo_result(
        as_json,
        {"orc": version(), "python": platform.python_version(), "torch": torch},
        f"orc {version()}  python {platform.python_version()}  torch {torch or 'not installed'}",
    )
