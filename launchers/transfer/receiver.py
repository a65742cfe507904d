"""Program on a host that receives snapshots: it names the contents that its store lacks, takes them, and lets the
snapshots appear.

Travels to the hosts with the modules that it imports: standard library only, Python >= 3.9. It ends, and leaves nothing
half-made, when the laptop goes away or falls silent.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from orc.launchers.agent.messages import encode_message
from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import EXECUTABLE, Bundle, Entry
from orc.launchers.snapshot.presence import locked
from orc.launchers.snapshot.tree_store import FULL, TreeStore, fsync_file, side_by_side, write_content
from orc.launchers.strict_modes import VARIABLE
from orc.launchers.transfer.wire import (
    CHUNK,
    MAGIC,
    ByteSource,
    WireError,
    read_message,
    receive_contents,
    unpack_manifests,
)

SILENCE_S = 20.0  # of the laptop, after which it is gone: a cut link closes no connection
BUSY_S = 3.0  # how often it hears that work goes on
_LOCK_S = 0.05  # how often a lock is tried
_F_SETPIPE_SZ, _PIPE = 1031, 1 << 20  # bytes; the constant has a name in Python 3.10
_BLOCK = 4096  # bytes that a file takes at least
_FREE_SPACE = "Free some space (`orc gc --cluster ...` removes what no job needs), or set `root:` of the host."


class Receiver:
    """Transfer into the store below one cluster root."""

    def __init__(self, source: io.BufferedReader) -> None:
        self._source = source
        self._store = TreeStore("/")  # until the request names it
        self._missing: dict[str, Entry] = {}

    def run(self) -> None:
        """Serve the laptop's request. Raises `WireError` when the connection is cut."""
        try:
            self._receive(read_message(self._source))
        except BundleError as error:
            _print(encode_message({"error": {"what": error.what, "where": error.where, "hint": error.hint}}))
        except OSError as error:
            _print(encode_message({"error": self._explain(error)}))

    def _receive(self, request: dict[str, Any]) -> None:
        root = os.path.expanduser(str(request["root"]))
        if not os.path.isabs(root):
            raise BundleError(f"not an absolute path: {root!r}", hint="Set `root:` of the cluster to one.")
        os.environ[VARIABLE] = str(request["trusted"])
        self._store = TreeStore(os.path.join(root, "store"))
        self._store.refuse_untrusted()
        bundles = [Bundle.from_dict(manifest) for manifest in unpack_manifests(request["manifests"])]
        if request["dry_run"]:
            self._list_missing([bundle for bundle in bundles if not self._store.has(bundle.digest)], dry_run=True)
            return
        self._store.sweep()
        if not bundles:
            self._list_missing([], dry_run=True)
            return
        with self._store.staging("sync") as staging, self._turn():
            bundles = [bundle for bundle in bundles if not self._store.use(bundle.digest)]
            self._list_missing(bundles)
            staged = list(self._stage(f"{staging}/objects")) if self._missing else []
            if not self._missing:
                for _ in side_by_side(fsync_file, [f"{staging}/objects/{entry.sha256}" for entry in staged]):
                    pass
                self._store.publish(staging, staged)
                for bundle in bundles:
                    if not self._store.use(bundle.digest):
                        self._store.build(bundle, staging)
        _print(encode_message({"missing": list(self._missing)}))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for other transfers into this store: what they bring, from other hosts that share it, is not sent again.

        Where there are no locks there is no wait, which is safe: then contents arrive twice.
        """
        fd = os.open(self._store.root / "receiving", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while locked(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) is False:
                time.sleep(_LOCK_S)
            with contextlib.suppress(OSError):  # a shared file system may remember that a name was not there
                os.listdir(self._store.root / "trees")
            yield
        finally:
            os.close(fd)

    def _list_missing(self, bundles: list[Bundle], *, dry_run: bool = False) -> None:
        """Send the list of contents of *bundles* that this host lacks. Raises `BundleError` for what cannot fit."""
        self._missing = {entry.sha256: entry for entry in self._store.missing(bundles)}
        if not dry_run:
            self._check_space(bundles)
        size = sum(entry.size for entry in self._missing.values())
        _print(
            encode_message({"new": [bundle.digest for bundle in bundles], "missing": list(self._missing), "size": size})
        )

    def _check_space(self, bundles: list[Bundle]) -> None:
        """Refuse at once what cannot fit. Raises `BundleError`."""
        copies = [e for bundle in bundles for e in bundle.entries if e.mode == EXECUTABLE]
        needed = sum(-(-entry.size // _BLOCK) * _BLOCK for entry in [*self._missing.values(), *copies])
        status = os.statvfs(self._store.root)
        free = status.f_bavail * status.f_frsize
        if needed > free:
            raise BundleError(
                f"no space for the snapshot: it needs {_megabytes(needed)}, {_megabytes(free)} are free",
                where=str(self._store.root),
                hint=_FREE_SPACE,
            )

    def _stage(self, directory: str) -> Iterator[Entry]:
        """Write the contents that come, verified, and yield their entries; what is damaged stays missing."""
        for digest, size, chunks in receive_contents(self._source):
            entry = self._missing.get(digest)
            if entry is None or size != entry.size:
                raise WireError(f"{digest} was not asked for")
            path = os.fsencode(f"{directory}/{digest}")
            if write_content(chunks, path, entry, 0o400, durable=False):
                del self._missing[digest]
                yield entry
            else:
                os.unlink(path)

    def _explain(self, error: OSError) -> dict[str, str]:
        if error.errno in FULL:
            lacking = sum(entry.size for entry in self._missing.values())
            missing = f", {_megabytes(lacking)} are still missing" if lacking else ""
            what = f"no space for the snapshot: {error.strerror}{missing}"
            return {"what": what, "where": str(self._store.root), "hint": _FREE_SPACE}
        place = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(self._store.root)
        hint = "Set `root:` of the host to a directory that you can write to."
        return {"what": f"cannot store the snapshot: {error.strerror or error}", "where": place, "hint": hint}


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _read(size: int) -> bytes:
    if not select.select([0], [], [], SILENCE_S)[0]:
        raise WireError("the laptop fell silent")
    return os.read(0, size)


_PRINTING = threading.Lock()


def _print(data: bytes) -> None:
    view = memoryview(data)
    with _PRINTING:
        while view:
            try:
                if not select.select([], [1], [], SILENCE_S)[1]:
                    raise WireError("the laptop fell silent")
                # A pipe that can take something takes a page at least without waiting.
                view = view[os.write(1, view[:4096]) :]
            except OSError as error:
                raise WireError(f"the laptop went away: {error.strerror}") from None


def _show_life() -> None:
    """Print signs of life; end the program when they are not read."""
    try:
        while True:
            time.sleep(BUSY_S)
            _print(encode_message({"busy": True}))
    except WireError:
        os.kill(os.getpid(), signal.SIGHUP)


def main() -> None:
    """Serve one request over standard input and output."""
    os.umask(0o077)
    # A transport that ends a program kills its process group. What is half-made must be removed all the same, so the
    # work is done in a session of its own, which ends when the laptop is gone.
    child = os.fork()
    if child:
        for number in (0, 1):
            os.close(number)
        ended = os.waitpid(child, 0)[1]
        os._exit(os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else 128 + os.WTERMSIG(ended))
    os.setsid()
    with contextlib.suppress(OSError):  # more than the system grants
        fcntl.fcntl(0, _F_SETPIPE_SZ, _PIPE)  # fewer turns between us and what hands us the data
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    threading.Thread(target=_show_life, name="orc-busy", daemon=True).start()
    try:
        _print(MAGIC)
        Receiver(io.BufferedReader(ByteSource(_read), CHUNK)).run()
    except WireError as error:
        sys.exit(f"orc: {error}")
