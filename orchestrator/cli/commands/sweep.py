"""`orc sweep`."""

from __future__ import annotations

from orc.orchestrator.cli.group_commands import group_command

command = group_command("sweep", "Jobs of one file with different values of some keys.")
