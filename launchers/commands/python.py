"""Command ``python``: the agent starts the ranks itself, with no launcher process between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.launchers.commands.base import NodeCommand, program_of
from orc.launchers.commands.options import about

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec


class PythonCommand:
    """Launcher of plain processes: the agent sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    kind = "python"

    def check(self, job: JobSpec) -> str | None:
        """Return the reason why this command cannot carry *job*: any option, because it has none."""
        if job.launcher.options:
            name = next(iter(job.launcher.options))
            return about(name, "cannot be given: the agent starts the ranks itself")
        return None

    def build(self, job: JobSpec) -> NodeCommand:
        """Return the program itself, once per rank."""
        return NodeCommand(spawn="ranks", program=program_of(job))


COMMAND = PythonCommand()
