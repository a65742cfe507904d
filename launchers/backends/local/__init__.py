"""Local: this machine, one agent per simulated node; the backend that needs no configuration."""

from orc.launchers.backends.local.backend import LocalBackend

BACKEND = LocalBackend

__all__ = ["BACKEND", "LocalBackend"]
