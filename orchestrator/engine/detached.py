"""The detached reconciler: a process that runs passes while there are live jobs, and ends when there are none.

`ensure` leaves one behind. It belongs to one ledger and one state directory, because the snapshots and the secrets of a
retry lie there. A lock on a file in that directory is its lease: a second one ends at once. It is stateless
like every pass, so it may be killed at any time; the next command that opens the ledger starts another one.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError
from orc.orchestrator.engine import steps

if TYPE_CHECKING:
    from orc.orchestrator.engine.passes import Passes
    from orc.orchestrator.workspace import Workspace

VARIABLE = "ORC_RECONCILER"  # "off": nobody starts one
LOG_NAME = "reconciler.log"
_LOG_BYTES = 1 << 20
_TAKE_S = 2.0  # a command that looks at the lease holds it for a moment

_started: list[subprocess.Popen[bytes]] = []  # by this process: waited for when they have ended


@dataclass(frozen=True)
class Process:
    """A detached reconciler, as it describes itself. Times are seconds since the epoch."""

    pid: int
    host: str
    started_at: float
    pass_at: float | None = None  # the end of its last pass
    live: int = 0  # jobs that had not ended then


class StopReason(enum.Enum):
    """Reason why passes with one client ended."""

    IDLE = enum.auto()  # no job is live
    LEDGER_GONE = enum.auto()
    CLUSTERS_CHANGED = enum.auto()  # another client reads their descriptions


class Lease:
    """The right to be the detached reconciler of one ledger."""

    def __init__(self, state_dir: Path, ledger_url: str) -> None:
        self.path = state_dir / f"reconciler-{hashlib.sha256(ledger_url.encode()).hexdigest()[:12]}.lock"

    @contextmanager
    def take(self, wait_s: float = 0.0) -> Iterator[int | None]:
        """Hold it: the file's descriptor, or `None` where another process has it for longer than *wait_s*."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_s
        try:
            while not _locked(descriptor):
                if time.monotonic() >= deadline:
                    yield None
                    return
                time.sleep(0.05)
            yield descriptor
        finally:
            os.close(descriptor)

    def holder(self) -> Process | None:
        """Return the process that holds it."""
        try:
            with self.take() as mine:
                if mine is not None:
                    return None
            return Process(**json.loads(self.path.read_bytes()))
        except (OSError, ValueError, TypeError):  # just taken, and not described yet
            return None

    def is_held(self) -> bool:
        """Return True when a process has it."""
        with self.take() as mine:
            return mine is None


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_switched_off() -> bool:
    """Return True when ``ORC_RECONCILER=off``."""
    return os.environ.get(VARIABLE, "").lower() in ("off", "0", "no", "false")


def ensure(state_dir: Path, ledger_url: str, clusters_file: Path | None = None) -> None:
    """Start a reconciler unless there is one. Failures are ignored: the job is safe without it."""
    _started[:] = [process for process in _started if process.poll() is None]
    if is_switched_off():
        return
    with contextlib.suppress(OSError):
        if not Lease(state_dir, ledger_url).is_held():
            _started.append(_start(state_dir, ledger_url, clusters_file))


def _start(state_dir: Path, ledger_url: str, clusters_file: Path | None) -> subprocess.Popen[bytes]:
    from orc.launchers import paths
    from orc.launchers.agent.variables import DERIVED

    # Not those of a rank: a job that submits another one must neither end it nor name its ranks.
    own = {*DERIVED, "ORC_GANG", steps.FAULT_POINT, steps.FAULT_HOLD}
    env = {name: value for name, value in os.environ.items() if name not in own}
    env |= {"ORC_STATE_DIR": str(state_dir.absolute()), "ORC_CONFIG_DIR": str(paths.config_dir())}
    if clusters_file is not None or os.environ.get("ORC_CLUSTERS"):
        env["ORC_CLUSTERS"] = str((clusters_file or paths.clusters_file()).absolute())
    if os.environ.get("ORC_LEDGER_URL") and _file(ledger_url):
        env["ORC_LEDGER_URL"] = ledger_url  # its path is absolute
    path = state_dir / LOG_NAME
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(path, flags | (os.O_TRUNC if _size(path) > _LOG_BYTES else 0), 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "orc.orchestrator.cli.main", "reconcile"],
            cwd=state_dir,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the end of a terminal or a login is not its end
        )
    finally:
        os.close(log)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def run(open_client: Callable[[], Passes], report_line: Callable[[str], None]) -> None:
    """Be the reconciler: run passes until no job is live. Returns at once where another process is."""
    while True:
        with open_client() as client:
            ws = client.workspace
            lease = Lease(ws.state_dir, ws.ledger.database.url)
            with lease.take(_TAKE_S) as descriptor:
                if descriptor is None:
                    return
                why = _serve(client, descriptor, report_line)
            # A submission while this process made up its mind has found the lease taken; also where the ledger was
            # replaced, by `orc adopt` for one.
            file = _file(ws.ledger.database.url)
            if why is StopReason.LEDGER_GONE and not (file and file.exists()):
                return
            if why is StopReason.IDLE and not ws.ledger.active() and _next_due(ws) is None:
                return


def _serve(client: Passes, descriptor: int, report_line: Callable[[str], None]) -> StopReason:
    """Run passes until there is a reason not to go on with this client."""
    from orc.orchestrator.engine.passes import Pass, PassLoop, stamp

    ws = client.workspace
    described = stamp(client.clusters_file)
    ledger = stamp(_file(ws.ledger.database.url))
    me = Process(os.getpid(), os.uname().nodename, ws.clock())
    trouble: Mapping[str, str] = {}
    scheduled: float | None = None
    passes = PassLoop(client)
    _describe(descriptor, me)
    report_line(f"process {me.pid} takes care of {ws.ledger.database.url}")
    while True:
        try:
            done = passes.run()
        except LaunchError as error:  # the ledger's disk is full, or another process holds it for very long
            done = Pass(None, {"ledger": str(error)})
        for where, why in done.trouble.items():
            if trouble.get(where) != why:
                report_line(f"{where}: {why}")
        trouble = done.trouble
        if done.jobs is not None:
            _describe(descriptor, Process(me.pid, me.host, me.started_at, ws.clock(), len(done.jobs)))
            scheduled = _next_due(ws)
            if not done.jobs and scheduled is None:
                report_line("no job is live")
                return StopReason.IDLE
        ws.sleep(passes.wait_s(scheduled))
        if stamp(_file(ws.ledger.database.url))[:2] != ledger[:2]:
            report_line("the ledger was removed or replaced")
            return StopReason.LEDGER_GONE
        if stamp(client.clusters_file) != described:
            return StopReason.CLUSTERS_CHANGED


def _next_due(ws: Workspace) -> float | None:
    """Return when something is due although no job is live: a schedule, or the look for an orphan."""
    from orc.orchestrator.engine import orphans, schedules

    return min((at for at in (schedules.next_due(ws), orphans.next_due(ws)) if at is not None), default=None)


def _describe(descriptor: int, me: Process) -> None:
    text = json.dumps(asdict(me)).encode().ljust(256)  # of one length: a reader never sees the rest of another
    with contextlib.suppress(OSError):  # a full disk: it is for people, not for the lease
        os.pwrite(descriptor, text, 0)


def _file(url: str) -> Path | None:
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
