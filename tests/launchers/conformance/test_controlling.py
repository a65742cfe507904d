"""Submitting, finding, cancelling: from the same process, from another, twice, with the first one gone."""

from orc.launchers.testing.suite.controlling import *
