"""The package that `orc.runtime` stands in for."""

PACKAGE = "accelerate"
VERSION = "1.12.0"  # the release whose documentation the runtime follows
