"""The program at the other end of a sync: says what its store lacks, takes it, and lets snapshots appear.

Travels to the hosts with the modules that it imports, over the channel on which it is then talked to: standard library
only, Python >= 3.9. It ends, and leaves nothing half-made, when the laptop goes away or falls silent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import EXECUTABLE, SYMLINK, Bundle, Entry
from orc.launchers.snapshot.tree_store import FULL, TreeStore, fsync_file, side_by_side, write_content
from orc.launchers.strict_modes import VARIABLE
from orc.launchers.transfer.wire import MAGIC, Channel, Message, WireError, deflate, inflate, receive_contents

if TYPE_CHECKING:
    from orc.launchers.transfer.peers import Shelf

SILENCE_S = 20.0  # of the laptop, after which it is gone: a cut link closes no connection
BUSY_S = 3.0  # how often it hears that work goes on
_F_SETPIPE_SZ, _PIPE = 1031, 1 << 20  # bytes; the constant has a name in Python 3.10
_BLOCK = 4096  # bytes that a file takes at least
_FREE_SPACE = "Free some space (`orc gc --cluster ...` removes what no job needs), or set `root:` of the host."
_IDENTITY = ".identity"  # equal on hosts that see the same store


class Remote:
    """One conversation about the store below one cluster root."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._resources = contextlib.ExitStack()
        self._work = self._resources.enter_context(contextlib.ExitStack())  # until everything is stored
        self._store = TreeStore("/")  # until `hello` names it
        self._staging = Path()
        self._bundles: list[Bundle] = []
        self._missing: dict[str, Entry] = {}
        self._staged: list[Entry] = []
        self._shelf: Shelf | None = None
        self._got = 0  # bytes
        self._handlers: dict[str, Callable[[Message], None]] = {
            "hello": self._hello,
            "manifests": self._manifests,
            "contents": self._contents,
            "fetch": self._fetch,
            "collect": self._collect,
            "wait": lambda _: None,
        }

    def run(self) -> None:
        """Answer until the laptop closes the channel. Raises `WireError` when it is cut."""
        with self._resources:
            while True:
                message = self._channel.receive()
                if message.op == "bye":
                    return
                handler = self._handlers.get(message.op)
                if handler is None:
                    raise WireError(f"unknown message {message.op!r}")
                try:
                    with self._busy():
                        handler(message)
                except BundleError as error:
                    self._work.close()
                    self._channel.send("error", kind="store", what=error.what, where=error.where, hint=error.hint)
                    return
                except OSError as error:
                    self._work.close()
                    self._channel.send("error", **self._explained(error))
                    return

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Let the laptop know, while something takes long, that it goes on."""
        done = threading.Event()

        def tell() -> None:
            with contextlib.suppress(WireError):
                while not done.wait(BUSY_S):
                    self._channel.send("busy", done=self._got)

        thread = threading.Thread(target=tell, name="orc-busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _hello(self, message: Message) -> None:
        """Which of the trees are here; nothing else needs to be said when all are."""
        root = os.path.expanduser(str(message.head["root"]))
        if not os.path.isabs(root):
            raise BundleError(f"not an absolute path: {root!r}", hint="Set `root:` of the cluster to one.")
        os.environ[VARIABLE] = str(message.head.get("trusted", ""))
        self._store = TreeStore(os.path.join(root, "store"))
        self._store.refuse_untrusted()
        with contextlib.suppress(OSError):  # a file system shared by hosts may remember that a name was not there
            os.listdir(self._store.root / "trees")
        look = bool(message.head["look"])
        if not look:
            self._store.sweep()
        here = self._store.has if look else self._store.use
        have = [digest for digest in message.head["digests"] if here(digest)]
        complete = len(have) == len(message.head["digests"])
        self._channel.send("have", have=have, identity="" if look or complete else self._identity())

    def _identity(self) -> str:
        """A name that all hosts read which share this file system: whoever is first gives it."""
        path = self._store.root / _IDENTITY
        with self._store.shared(), contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as out:
                out.write(os.urandom(16).hex().encode())
        deadline = time.monotonic() + 1.0
        while not (text := path.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.01)  # the one who gives it writes it now
        return text.decode("ascii", "replace")

    def _manifests(self, message: Message) -> None:
        """Which contents of these trees are missing."""
        self._bundles = [Bundle.from_dict(manifest) for manifest in json.loads(inflate(message.body))]
        look = bool(message.head["look"])
        if not look:
            self._staging = self._work.enter_context(self._store.staging("sync"))
        missing = self._store.missing(self._bundles)
        self._missing = {entry.sha256: entry for entry in missing}
        size = sum(entry.size for entry in missing)
        if not look:
            self._check_room(missing)
            if not missing:
                self._finish()
                return
        serving = self._serve(str(message.head["serve"])) if message.head["serve"] else {}
        self._channel.send("missing", deflate(json.dumps(list(self._missing)).encode()), size=size, **serving)

    def _check_room(self, missing: list[Entry]) -> None:
        """Refuse at once what cannot fit. Raises `BundleError`."""
        copies = [e for bundle in self._bundles for e in bundle.entries if e.mode == EXECUTABLE]
        needed = sum(-(-entry.size // _BLOCK) * _BLOCK for entry in [*missing, *copies])
        status = os.statvfs(self._store.root)
        free = status.f_bavail * status.f_frsize
        if needed > free:
            raise BundleError(
                f"no space for the snapshot: it needs {_megabytes(needed)}, {_megabytes(free)} are free",
                where=str(self._store.root),
                hint=_FREE_SPACE,
            )

    def _contents(self, message: Message) -> None:
        """A stream of contents from the laptop."""
        self._take(self._channel, bool(message.head["compressed"]))
        self._finish()

    def _fetch(self, message: Message) -> None:
        """A stream of contents from another host; what it cannot give stays missing."""
        from orc.launchers.transfer.peers import PeerError, fetch

        head, problem = message.head, ""
        try:
            fetch(
                [str(address) for address in head["addresses"]],
                int(head["port"]),
                str(head["label"]),
                str(head["token"]),
                list(self._missing),
                lambda channel: self._take(channel, False),
            )
        except PeerError as error:
            problem = str(error)
        self._finish(problem)

    def _take(self, channel: Channel, compressed: bool) -> None:
        """Stage what comes, verified; what is damaged stays missing."""
        for digest, size, chunks in receive_contents(channel, compressed):
            entry = self._missing.get(digest)
            if entry is None or size != entry.size:
                raise WireError(f"{digest} was not asked for")
            path = os.fsencode(f"{self._staging}/objects/{digest}")
            complete = False
            try:
                complete = write_content(chunks, path, entry, 0o400, durable=False)
            finally:
                if not complete:
                    os.unlink(path)
            if complete:
                del self._missing[digest]
                self._staged.append(entry)
                self._got += size
                if self._shelf is not None:
                    self._shelf.arrived(digest)

    def _finish(self, problem: str = "") -> None:
        """When all contents are here: make them durable, and let them and the trees appear."""
        if not self._missing:
            for _ in side_by_side(fsync_file, [f"{self._staging}/objects/{e.sha256}" for e in self._staged]):
                pass
            self._store.publish(self._staging, self._staged)
            for bundle in self._bundles:
                if not self._store.use(bundle.digest):
                    self._store.build(bundle, self._staging)
            self._work.close()
        self._channel.send("missing", deflate(json.dumps(list(self._missing)).encode()), size=0, problem=problem)

    def _serve(self, secret: str) -> dict[str, Any]:
        """Pass the contents of these trees on to other hosts, as they come."""
        from orc.launchers.transfer.peers import PeerServer, Shelf, own_addresses

        sizes = {e.sha256: e.size for bundle in self._bundles for e in bundle.entries if e.mode != SYMLINK}
        self._shelf = Shelf(self._store.root / "cas", self._staging / "objects", sizes, self._missing)
        server = PeerServer(self._shelf, secret)
        self._resources.callback(server.close)
        return {"port": server.port, "addresses": own_addresses()}

    def _collect(self, message: Message) -> None:
        """Remove what no job needs."""
        from orc.launchers.snapshot.gc import Request, collect

        asked = Request.from_dict(message.head)
        self._channel.send("collected", deflate(json.dumps(collect(asked).to_dict()).encode()))

    def _explained(self, error: OSError) -> dict[str, Any]:
        place = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(self._store.root)
        if error.errno in FULL:
            lacking = sum(entry.size for entry in self._missing.values())
            missing = f", {_megabytes(lacking)} are still missing" if lacking else ""
            return {
                "kind": "full",
                "what": f"no space for the snapshot: {error.strerror}{missing}",
                "where": str(self._store.root),
                "hint": _FREE_SPACE,
            }
        return {
            "kind": "store",
            "what": f"cannot store the snapshot: {error.strerror or error}",
            "where": place,
            "hint": "Set `root:` of the host to a directory that you can write to.",
        }


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _standard_input(size: int) -> bytes:
    if not select.select([0], [], [], SILENCE_S)[0]:
        raise WireError("the laptop fell silent")
    return os.read(0, size)


def _standard_output(data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            if not select.select([], [1], [], SILENCE_S)[1]:
                raise WireError("the laptop fell silent")
            # A pipe that can take something takes a page at least without waiting.
            view = view[os.write(1, view[:4096]) :]
        except OSError as error:
            raise WireError(f"the laptop went away: {error.strerror}") from None


def main() -> None:
    """Talk over standard input and output."""
    os.umask(0o077)
    # A transport that ends a program kills its process group. What is half-made must be removed all the same, so the
    # work is done in a session of its own, which ends when nobody talks to it any more.
    child = os.fork()
    if child:
        for number in (0, 1):
            os.close(number)
        ended = os.waitpid(child, 0)[1]
        os._exit(os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else 128 + os.WTERMSIG(ended))
    os.setsid()
    with contextlib.suppress(OSError):  # more than the system grants everybody
        fcntl.fcntl(0, _F_SETPIPE_SZ, _PIPE)  # fewer turns between us and what hands us the data
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        _standard_output(MAGIC)
        Remote(Channel(_standard_input, _standard_output)).run()
    except WireError as error:
        sys.exit(f"orc: {error}")
