"""Fixtures: `postgres_url`, an empty ledger in a real PostgreSQL server, and `postgres_database`, an empty database."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
START_S = 60.0
_TEMPLATE = "ledger_template"


def _programs() -> Path | None:
    """The directory of ``initdb`` and ``postgres``; the newest when there are several."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parts[-2]), reverse=True)
    elsewhere = [Path(program).resolve().parent for program in [shutil.which("postgres")] if program]
    complete = (d for d in [*debian, *elsewhere] if all((d / p).exists() for p in ("initdb", "postgres", "pg_isready")))
    return next(complete, None)


class PostgresServer:
    """A server of our own below *directory*, reached through a socket there."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self.directory = directory
        self._programs = programs
        self._numbers = itertools.count()
        # PostgreSQL refuses to run as root.
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:
            user = pwd.getpwnam("postgres")
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(directory, user.pw_uid, user.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make the data directory, `run` the server."""
        data = self.directory / "data"
        argv = [self._programs / "initdb", "-D", data, "-U", "orc", "-A", "trust", "-E", "UTF8"]
        done = subprocess.run(
            [*argv, "--locale=C", "--no-sync"], capture_output=True, text=True, cwd=self.directory, **self._as
        )
        assert done.returncode == 0, done.stderr
        self.run()

    def run(self) -> None:
        """Run the server on the data directory, wait until it answers."""
        data = self.directory / "data"
        settings = {"listen_addresses": "", "unix_socket_directories": self.directory, "fsync": "off"}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", data, *options],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                **self._as,
            )
        deadline = time.monotonic() + START_S
        ready = [self._programs / "pg_isready", "-q", "-h", self.directory, "-U", "orc"]
        while subprocess.run(ready, check=False).returncode != 0:
            said = (self.directory / "log").read_text()
            assert self._process.poll() is None, f"PostgreSQL did not start:\n{said}"
            assert time.monotonic() < deadline, f"PostgreSQL did not start within {START_S:g} s:\n{said}"
            time.sleep(0.05)

    def stop(self) -> None:
        """End it, and all connections with it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait(30)

    def url(self, database: str) -> str:
        """What SQLAlchemy calls *database*."""
        return f"postgresql+psycopg://orc@/{database}?host={self.directory}"

    def create(self, template: str = "template1") -> str:
        """The name of a new database that is a copy of *template*."""
        name = f"test{next(self._numbers)}"
        self.do(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    @contextmanager
    def ledger(self, template: str) -> Iterator[str]:
        """The URL of a new database that is a copy of *template*, and gone afterwards."""
        name = self.create(template)
        try:
            yield self.url(name)
        finally:
            self.drop(name)

    def drop(self, name: str) -> None:
        """Remove a database, whoever is still connected."""
        self.do(f"DROP DATABASE {name} WITH (FORCE)")

    def do(self, statement: str) -> None:
        """Run a statement that is allowed in no transaction."""
        import psycopg

        with psycopg.connect(host=str(self.directory), user="orc", dbname="postgres", autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The running server."""
    required = os.environ.get("ORC_REQUIRE_TESTBEDS") == "1"
    if required:
        subprocess.run([HERE / "install.sh"], check=True, timeout=170)
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed; tests/testbed/postgres/install.sh does it on Debian and Ubuntu")
    # Not below pytest's directories: their paths are too long for a socket, and closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="orc-postgres-", dir="/tmp"))
    server = PostgresServer(programs, directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def _ledger_template(postgres: PostgresServer) -> str:
    from orc.orchestrator.ledger.engine import upgrade

    postgres.do(f"CREATE DATABASE {_TEMPLATE}")
    upgrade(postgres.url(_TEMPLATE), None)
    return _TEMPLATE


@pytest.fixture
def postgres_database(postgres: PostgresServer) -> Iterator[str]:
    """The URL of an empty database."""
    with postgres.ledger("template1") as url:
        yield url


@pytest.fixture
def postgres_url(postgres: PostgresServer, _ledger_template: str) -> Iterator[str]:
    """The URL of an empty ledger."""
    with postgres.ledger(_ledger_template) as url:
        yield url


@pytest.fixture
def empty_ledgers(postgres: PostgresServer, _ledger_template: str) -> Callable[[], AbstractContextManager[str]]:
    """Makes URLs of empty ledgers, each for one ``with`` block."""
    return lambda: postgres.ledger(_ledger_template)
