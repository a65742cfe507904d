"""SSH: bare hosts that orc logs in to. Each host of a job runs one agent; nothing but sshd and Python need be there."""

from orc.launchers.backends.ssh.backend import SshBackend

BACKEND = SshBackend

__all__ = ["BACKEND", "SshBackend"]
