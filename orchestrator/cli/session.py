"""The client of one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from orc.orchestrator.client import Client


def open_client() -> Client:
    """A client that is closed when the command ends. Raises `LaunchError`."""
    from orc.orchestrator.client import Client

    client = Client()
    click.get_current_context().call_on_close(client.close)
    return client
