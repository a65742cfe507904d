"""`orc array`."""

from __future__ import annotations

from orc.orchestrator.cli.group_commands import group_command

command = group_command("array", "Jobs of one file that differ in a number.")
