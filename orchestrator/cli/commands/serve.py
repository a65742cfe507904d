"""`orc serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import json_option
from orc.orchestrator.cli.ui.output import echo, echo_json_line


@click.command("serve")
@click.option("--host", metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one. [default: 8770]")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate chain (PEM).")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Key of the certificate (PEM).")
@click.option("--behind-proxy", is_flag=True, default=None, help="A proxy ends TLS and passes on the caller's address.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name that requests may use. May be repeated.",
)
@click.option(
    "--access-log", type=click.Choice(["text", "json"]), help="Form of the access log; json: one object on each line."
)
@click.option("--no-reconciler", is_flag=True, help="Only serve; another process runs the passes.")
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="File of settings instead of service.yaml."
)
@json_option
def command(
    allowed_hosts: tuple[str, ...], no_reconciler: bool, config: Path | None, as_json: bool, **given: Any
) -> None:
    """Serve the ledger over HTTP: REST API, event streams and web page, and run the passes of the reconciler.

    Settings are flags, ORC_SERVE_* variables, or keys of service.yaml (docs/reference/rest-api.md). Every request needs
    a token (`orc token create`). Without --host the service accepts requests only from this machine.
    """
    import logging

    try:
        from orc.orchestrator.service.server import serve
        from orc.orchestrator.service.settings import load_settings
    except ImportError as error:
        raise LaunchError(
            f"the service needs {error.name or error}, which is not installed here",
            hint="pip install 'orc-launch[service]'",
        ) from None
    from orc.orchestrator.client import Client

    chosen = {**given, "allowed_hosts": allowed_hosts or None, "reconciler": False if no_reconciler else None}
    settings = load_settings(chosen, config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if settings.access_log == "json":
        bare = logging.StreamHandler()  # on stderr as well, with nothing before or behind the object
        bare.setFormatter(logging.Formatter("%(message)s"))
        access = logging.getLogger("orc.service.access")
        access.addHandler(bare)
        access.propagate = False

    def tell(url: str) -> None:
        if as_json:
            echo_json_line({"url": url})
        else:
            echo(f"serving on {url}")

    serve(settings, lambda: Client(reconciler=False), tell)
