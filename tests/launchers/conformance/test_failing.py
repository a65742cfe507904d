"""What every backend says about a job that fails, and what it leaves behind: nothing."""

from orc.launchers.testing.suite.failing import *
