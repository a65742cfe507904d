"""Command lines that reach the node of an attempt, for ``orc exec``, ``orc ssh`` and ``orc top``. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orc.launchers.backends.base import NodeEntry
from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON
from orc.launchers.remote.ssh.client import ssh_argv

if TYPE_CHECKING:
    from orc.launchers.backends.ssh.settings import Settings


def entry(settings: Settings, name: str, node: int, directory: str) -> NodeEntry:
    """Return the way to node *node* of an attempt, which runs on the host *name*."""
    host, access = settings.spec(name), settings.options.access
    return NodeEntry(
        node,
        name,
        directory,
        settings.python_of(name) or DEFAULT_PYTHON,
        ssh_argv(host, access, terminal=False),
        ssh_argv(host, access, terminal=True),
        through_shell=True,
    )
