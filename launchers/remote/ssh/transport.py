"""`Transport` for a machine that is reached over SSH."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.remote.ssh.errors import LinkLost
from orc.launchers.remote.ssh.hosts import HostSpec
from orc.launchers.remote.ssh.pool import Links, shut
from orc.launchers.remote.transport import Completed, Process, disk_hint, run_anew, stream_anew

if TYPE_CHECKING:
    from orc.launchers.remote.programs import Program

_DISK_S = 60.0  # a file operation that takes longer hangs
_STALE_S = 10.0  # an idle connection is tried before it is used: it may have died unnoticed
_PING_S = 5.0


class SshTransport:
    """One machine, over one connection that all threads share. It connects when first used, and again when needed."""

    def __init__(self, spec: HostSpec, links: Links) -> None:
        self.name = spec.name
        self.spec = spec
        self._links = links
        self._connecting = threading.Lock()  # one thread connects, the others wait for it
        self._hand: Any = None  # Hand: its import costs time

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        drop_env: Sequence[str] = (),
        keep_env: Sequence[str] = (),
        stdin: bytes | None = None,
    ) -> Completed:
        """See `Transport.run`. The command's whole process group dies with a time-out and with the connection."""
        from orc.launchers.remote.ssh.process import SshProcess

        with SshProcess(
            self._connected()[0],
            argv,
            timeout_s,
            env or {},
            drop_env=drop_env,
            keep_env=keep_env,
            has_input=stdin is not None,
        ) as process:
            return process.finish(stdin)

    def stream(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Process:
        """See `Transport.stream`."""
        from orc.launchers.remote.ssh.process import SshProcess

        process = SshProcess(self._connected()[0], argv, timeout_s, env or {})
        try:
            process.await_start()
        except BaseException:
            process.__exit__()
            raise
        return process

    def run_program(
        self, program: Program, arguments: Sequence[str] = (), *, python: str, timeout_s: float, stdin: bytes = b""
    ) -> Completed:
        """See `Transport.run_program`. It runs in a copy of the hand where that is the same interpreter."""
        from orc.launchers.remote.ssh.process import SshProcess

        hand, argv = self._connected()[0], (self.expand(python), *arguments)
        if argv[0] != hand.hello["interpreter"]:
            return run_anew(self, program, arguments, python=python, timeout_s=timeout_s, stdin=stdin)
        with SshProcess(hand, argv, timeout_s, {}, program=hand.bring(program)) as process:
            return process.finish(stdin)

    def stream_program(
        self, program: Program, arguments: Sequence[str] = (), *, python: str, timeout_s: float
    ) -> Process:
        """See `Transport.stream_program`. It runs in a copy of the hand where that is the same interpreter."""
        from orc.launchers.remote.ssh.process import SshProcess

        hand, argv = self._connected()[0], (self.expand(python), *arguments)
        if argv[0] != hand.hello["interpreter"]:
            return stream_anew(self, program, arguments, python=python, timeout_s=timeout_s)
        return SshProcess(hand, argv, timeout_s, {}, program=hand.bring(program))

    def expand(self, path: str) -> str:
        """See `Transport.expand`."""
        if path == "~" or path.startswith("~/"):
            return str(self._connected()[0].hello["home"]) + path[1:]
        if not path.startswith("~"):
            return path
        return str(self._ask("expand", path)["path"])

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Transport.write`."""
        self._ask("write", path, f"cannot write {path}", data, mode=mode, size=len(data))

    def mkdir(self, path: str, *, mode: int = 0o700) -> None:
        """See `Transport.mkdir`."""
        self._ask("mkdir", path, f"cannot make {path}", mode=mode)

    def remove(self, path: str) -> None:
        """See `Transport.remove`."""
        self._ask("remove", path, f"cannot remove {path}")

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See `Transport.read`."""
        return bytes(self._frame("read", path, f"cannot read {path}", offset=offset, limit=limit)[1])

    def read_many(self, paths: Iterable[str]) -> dict[str, bytes]:
        """See `Transport.read_many`."""
        wanted = json.dumps(list(paths)).encode()
        answer, data = self._frame("read_many", "", "cannot read files", wanted, size=len(wanted))
        found, begin = {}, 0
        for path, size in answer["sizes"].items():
            found[path] = data[begin : begin + size]
            begin += size
        return found

    def names(self, path: str) -> list[str]:
        """See `Transport.names`."""
        return list(self._ask("names", path, f"cannot list {path}")["names"])

    def close(self) -> None:
        """See `Transport.close`. What still runs there for us is ended."""
        hand, self._hand = self._hand, None  # without the lock: nobody wants to wait for a host that is being called
        if hand is not None:
            hand.close()
            self._links.close_unused()

    def __repr__(self) -> str:
        return f"SshTransport({self.name})"

    def _ask(self, op: str, path: str, what: str = "", payload: bytes = b"", **fields: Any) -> dict[str, Any]:
        return dict(self._frame(op, path, what, payload, **fields)[0])

    def _frame(
        self, op: str, path: str, what: str = "", payload: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """One file operation. All can be done twice, so one that met a dead connection is tried on a new one."""
        while True:
            hand, fresh = self._connected()
            try:
                header, data = hand.ask(op, payload, timeout_s=_DISK_S, path=path, **fields)
                return header, data
            except LinkLost:
                if fresh:
                    raise
            except queue.Empty:
                raise BackendUnreachable(
                    f"{what}: its file system has not answered for {_DISK_S:g} s", where=self.name
                ) from None
            except OSError as error:
                self._refuse(op, path, what, error)

    def _refuse(self, op: str, path: str, what: str, error: OSError) -> NoReturn:
        if op in ("read", "read_many", "names"):
            # What `LocalTransport` raises there, a FileNotFoundError most of the time.
            raise OSError(error.errno, error.strerror, path or None) from None
        raise BackendError(f"{what}: {error.strerror}", where=self.name, hint=disk_hint(error)) from error

    def _connected(self) -> tuple[Any, bool]:
        """The connection, and whether it was made just now. Raises `BackendUnreachable`."""
        with self._connecting:
            hand = self._hand
            if hand is not None and self._still_there(hand):
                return hand, False
            self._hand = hand = self._connect()
            return hand, True

    def _still_there(self, hand: Any) -> bool:
        if hand.alive and time.monotonic() - hand.heard > _STALE_S:
            try:
                hand.ask("ping", timeout_s=_PING_S)
            except (LinkLost, queue.Empty):
                hand.close()
        return bool(hand.alive)

    def _connect(self) -> Any:
        from paramiko import SSHException

        from orc.launchers.remote.ssh.hand import Hand

        connection = self._links.connect(self.spec)
        try:
            channel = connection.open_session(timeout=self._links.access.connect_timeout_s)
            return Hand(
                self.name, channel, self.spec.python, self._links.access.connect_timeout_s, partial(shut, connection)
            )
        except (SSHException, EOFError, OSError) as error:
            shut(connection)
            raise LinkLost(f"it logs us in, but opens no session: {error}", where=self.name) from error
        except BaseException:
            shut(connection)
            raise
