"""`orc pipeline`."""

from __future__ import annotations

from orc.orchestrator.cli.group_commands import group_command

command = group_command("pipeline", "Jobs of one file that wait for each other and pass files on.")
