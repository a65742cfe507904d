"""Ownership of a folder of checkpoints, which belongs to one run at a time.

A run holds ``flock`` on a file in the folder from its first save there until it ends, and writes into it who it is.
Where the file system passes locks on between machines (NFS, Lustre with ``flock``, GPFS, CephFS), the lock alone
decides. Where it does not, the record does: who takes the folder last owns it, and the run before is told at its next
save, as the record is read again before each save and each commit. So it is with a later attempt or restart of the same
job: a file server may keep the lock of a machine that is gone.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.launch.environment.orc import job_facts

FILE = ".orc-owner"
PROJECT_FOLDER = "checkpoints"  # of a project directory, with automatic naming
# A killed run's worker processes have its lock until they see that it is gone; torch's look every 5 seconds.
_PATIENCE_S = 15.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_RUN = secrets.token_hex(8)  # this process and those that it forks


@dataclass(frozen=True)
class Owner:
    """The process that saves in a folder; ``since`` is in seconds since the epoch, ``job_id`` empty outside a job."""

    run: str
    host: str
    pid: int
    job: str
    since: float
    job_id: str = ""
    attempt: int = 0
    restart: int = 0

    @classmethod
    def of_this_process(cls) -> Owner:
        """Return the owner record of this process."""
        facts = job_facts(os.environ)
        name = facts.name or facts.id
        job = f"job {name}" + (f" attempt {facts.attempt}" if facts.attempt else "") if name else ""
        place = (facts.id or "", facts.attempt, facts.restart)
        return cls(_RUN, socket.gethostname(), os.getpid(), job, time.time(), *place)

    def succeeds(self, other: Owner) -> bool:
        """Return whether it is a later run of the same job, of which only the newest trains (see `fence`)."""
        return bool(self.job_id) and self.job_id == other.job_id and self._turn > other._turn

    @property
    def _turn(self) -> tuple[int, int]:
        return self.attempt, self.restart

    def is_here(self) -> bool:
        """Return whether it is this very process, which did not inherit it."""
        return (self.run, self.pid) == (_RUN, os.getpid())

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"{self.job or 'a run without a job'}, process {self.pid} on {self.host}, since {when}"


@dataclass(frozen=True)
class Ownership:
    """This run's hold on *folder*, which the file *path* records."""

    path: Path
    fd: int
    folder: Path

    def check(self) -> None:
        """Raise `CheckpointError` when another run has taken the folder meanwhile."""
        owner = _read(self.path)
        if owner is not None and owner.run != _RUN:
            raise CheckpointError(
                f"{self.folder} was taken over by another run: {owner}. Only one run may save in a folder; give "
                "each its own"
            )

    def release(self) -> None:
        """Give the folder up."""
        with suppress(OSError):
            if _same(self.fd, self.path) and (owner := _read(self.path)) is not None and owner.is_here():
                self.path.unlink()
        os.close(self.fd)


_held: dict[Path, Ownership] = {}
_lock = threading.Lock()


def record(folder: Path) -> tuple[Path, str]:
    """Return the directory and the suffix of the file that names the run that numbers checkpoints in *folder*.

    It lies in *folder*, but for ``<project_dir>/checkpoints`` below the user's state directory: people and scripts list
    their project, and what they find there is theirs.
    """
    if folder.name != PROJECT_FOLDER:
        return folder, ""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "orc"
    directory = state / "checkpoint-folders"
    try:
        state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in (state, directory):
            one.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # a container's user may have no home that can be written
        return folder, ""
    return directory, f"-{sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}"


def own(folder: Path, part: str = "", *, within: Path | None = None) -> Ownership:
    """Return this run's hold on *folder* (or *part* of it, by machine), which it gets if no other run has it.

    Args:
        within: the directory of the file that says so, where it is not *folder* (see `record`).

    Raises:
        CheckpointError: another run has it; the text names host, process and job.
    """
    path = (within or folder) / f"{FILE}{part}"
    with _lock:
        known = _held.get(path)
        if known is not None and _same(known.fd, path):
            known.check()
            return known
        if known is not None:  # the folder was removed, and is a new one now
            os.close(_held.pop(path).fd)
        _held[path] = taken = _take(path, folder)
        return taken


def disown(owned: Ownership) -> None:
    """Give one folder up."""
    with _lock:
        if _held.pop(owned.path, None) is not None:
            owned.release()


def release_all() -> None:
    """Give up all folders: the run is over."""
    with _lock:
        while _held:
            _held.popitem()[1].release()


def forget_dead(folder: Path) -> None:
    """Remove what killed runs of this machine have left where the hold on *folder* is recorded."""
    for path in record(folder)[0].glob(f"{FILE}*"):
        owner = _read(path)
        if path in _held or owner is None or owner.host != socket.gethostname() or _lives(owner):
            continue
        with suppress(FileNotFoundError):  # another rank may look too
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _flock(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _take(path: Path, folder: Path) -> Ownership:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            locked = _flock(fd)
            if locked and _same(fd, path):  # else whoever had it has removed it
                _write(fd)
                return Ownership(path, fd, folder)
            owner = _read(path)
            if not locked and owner is not None and Owner.of_this_process().succeeds(owner):
                path.unlink(missing_ok=True)  # the next one is another file, with a lock of its own
            elif not locked and (time.monotonic() >= deadline or _lives(owner)):
                raise CheckpointError(
                    f"{folder} is in use by another run: {owner or 'it does not say which'}. Only one run may "
                    "save in a folder; give each its own, or wait until that one has ended"
                )
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.2)


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _lives(owner: Owner | None) -> bool:
    """Return whether the process of *owner* is known to live: on this machine."""
    if owner is None or owner.host != socket.gethostname():
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _write(fd: int) -> None:
    data = json.dumps(asdict(Owner.of_this_process())).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)


def _read(path: Path) -> Owner | None:
    """Return the owner recorded at *path*; `None` where there is none, or not yet."""
    try:
        raw = json.loads(path.read_bytes())
        place = str(raw.get("job_id", "")), int(raw.get("attempt", 0)), int(raw.get("restart", 0))
        return Owner(str(raw["run"]), str(raw["host"]), int(raw["pid"]), str(raw["job"]), float(raw["since"]), *place)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


atexit.register(release_all)


def refuse_superseded(env: Mapping[str, str] = os.environ) -> None:
    """Raise `CheckpointError` when a newer attempt or restart owns the job of *env*; outside a job, do nothing.

    The agent ends such ranks (docs/explanation/agent.md, "Only the newest run trains"). This covers the moment between
    their waking up, after the whole machine was stopped, and that.
    """
    job = job_facts(env)
    if job.job_dir is None:
        return
    path = Path(job.job_dir) / "fence.json"
    try:
        owner = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # not shared with this machine; or lost by one that crashed
        return
    newest = int(owner.get("attempt", 0)), int(owner.get("restart", 0))
    if newest > (job.attempt, job.restart):
        raise CheckpointError(
            f"attempt {newest[0]}, restart {newest[1]} on {owner.get('host')} owns the job now ({path}); "
            f"this is attempt {job.attempt}, restart {job.restart}, and its checkpoint is not committed"
        )
