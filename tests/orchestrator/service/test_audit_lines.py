"""Lines of the audit log that come at once are written together, and each by itself where one cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orc.launchers.errors import LaunchError
from orc.orchestrator.client import Client
from orc.orchestrator.ledger import audit
from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.service.ledger_clients import LedgerClients, Lines


def line(action: str) -> Callable[[Connection], None]:
    return lambda connection: audit.append(connection, at=1.0, user="ann", action=action)


@pytest.mark.parametrize("bad", [False, True])
def test_lines_that_come_while_one_is_written_are_one_transaction_after_it(tmp_path: Path, bad: bool) -> None:
    clients = LedgerClients(lambda: Client(tmp_path / "state", reconciler=False), 4)
    lines, begun, go_on, writes = Lines(clients), threading.Event(), threading.Event(), []

    def first(connection: Connection) -> None:
        begun.set()
        go_on.wait(60)
        line("first")(connection)

    def refused(_: Connection) -> None:
        raise LaunchError("cannot be written")

    with clients.client() as client:  # the one that is used next
        database, write = client.workspace.ledger.database, client.workspace.ledger.database.write
        database.write = lambda: writes.append(1) or write()  # type: ignore[func-returns-value, method-assign]
    with ThreadPoolExecutor(9) as pool:
        told = [pool.submit(lines.write, first)]
        begun.wait(60)
        told += [pool.submit(lines.write, line(f"line-{number}")) for number in range(7)]
        if bad:
            told.append(pool.submit(lines.write, refused))
        while len(lines._waiting) < len(told) - 1:
            begun.wait(0.001)
        go_on.set()
        errors = [future.exception(60) for future in told]
    assert [str(error) for error in errors if error] == (["cannot be written"] if bad else [])
    assert len(writes) == (2 + 8 if bad else 2)
    with clients.client() as client, client.workspace.ledger.database.read() as connection:
        assert {entry.action for entry in audit.page(connection, 20)} == {"first", *(f"line-{i}" for i in range(7))}
    clients.close()
