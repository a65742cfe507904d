"""Transports to hosts with a configuration of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.backends.ssh.hosts import open_transports
from orc.launchers.remote.transport import Transport

Reach = Callable[..., Transport]


@pytest.fixture
def reach(hosts: Any, tmp_path: Path) -> Iterator[Reach]:
    """``reach("node1", "Port 22", connect_timeout=3)``: a transport; the text precedes the testbed's configuration."""
    opened: list[Transport] = []

    def transport(name: str, config: str = "", *, host: dict[str, Any] | None = None, **options: Any) -> Transport:
        file = tmp_path / f"config-{len(opened)}"
        file.write_text(f"{config}\n{hosts.ssh_config.read_text()}")
        cluster = hosts.cluster(hosts=[{"name": name, **(host or {})}], ssh_config=str(file), **options)
        opened.append(open_transports(cluster)[name])
        return opened[-1]

    yield transport
    for each in opened:
        each.close()


@pytest.fixture
def hostname() -> Callable[[Transport], str]:
    """What the machine at the other end is called."""
    return lambda transport: transport.run(("hostname",), timeout_s=20).stdout.strip()
