"""How often a test looks at what it waits for."""

from orc.launchers.testing.jobs import polls

__all__ = ["polls"]
