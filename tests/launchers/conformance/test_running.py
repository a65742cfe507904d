"""What every backend does with a job that runs to its end."""

from orc.launchers.testing.suite.running import *
