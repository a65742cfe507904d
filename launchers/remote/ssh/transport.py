"""`Transport` for a machine that is reached over SSH, and the connections to the hosts of one cluster.

Hosts behind a jump host share the connection to it.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import tarfile
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orc.launchers.agent.records import RECORD_BYTES
from orc.launchers.errors import BackendError, BackendUnreachable, LinkLost, NoSession, SpecError
from orc.launchers.remote.ssh.routes import Config, ConnectOptions, HostSpec, Route, read_config, resolve
from orc.launchers.remote.transport import (
    NO_LINKS,
    CommandTimeout,
    Completed,
    Process,
    Transport,
    WholeFile,
    disk_hint,
)

if TYPE_CHECKING:
    from orc.launchers.remote.ssh.connection import HostConnection
    from orc.launchers.remote.ssh.link import Link, SshProcess

_DEEPEST = 8  # jump hosts in a row


def check_fabric() -> None:
    """Raise `BackendUnreachable` where fabric is not installed: another process may have it, so jobs can wait."""
    if importlib.util.find_spec("fabric") is None:
        what = "connections over SSH need fabric, which is not installed here"
        raise BackendUnreachable(what, hint="pip install 'orc-launch[ssh]'")


class ConnectionPool:
    """Makes the connections of one cluster, whose jump hosts it closes when nothing is behind them any more.

    Raises `BackendUnreachable` where fabric is not installed.
    """

    def __init__(self, access: ConnectOptions) -> None:
        check_fabric()
        self.access = access
        self._lock = threading.RLock()
        self._gateways: dict[Route, HostConnection] = {}
        self._connections: list[HostConnection] = []

    def connection(self, spec: HostSpec) -> HostConnection:
        """Return a connection to a host, which is not open yet. Raises `SpecError`."""
        with self._lock:
            return self._connection(resolve(spec, self._config))

    def close_unused(self) -> None:
        """Close the connections to jump hosts behind which there is none."""
        with self._lock:
            unused = [
                gateway
                for gateway in self._gateways.values()
                if gateway.is_connected and not any(c.gateway is gateway and c.is_used for c in self._connections)
            ]
        for gateway in unused:
            gateway.close()  # and with it one that only leads to it

    @cached_property
    def _config(self) -> Config:
        return read_config(self.access.config_files())

    def _connection(self, route: Route, behind: tuple[str, ...] = ()) -> HostConnection:
        """Return a connection to the host of *route*, through which the way to the hosts *behind* it leads."""
        from orc.launchers.remote.ssh.connection import HostConnection

        names = (*behind, route.name)
        if route.name in behind or len(names) > _DEEPEST:
            raise SpecError(
                f"jump hosts lead in a circle: {' -> '.join(names)}",
                hint="Look for ProxyJump in ~/.ssh/config, and set `ProxyJump none` for the jump host itself.",
            )
        gateway = None
        if route.jumps:
            *others, last = route.jumps
            jump = resolve(last, self._config)
            jump = replace(jump, jumps=tuple(others), proxy_command=None) if others else jump
            if jump not in self._gateways:
                self._gateways[jump] = self._connection(jump, names)
            gateway = self._gateways[jump]
        connection = HostConnection(route, self.access, gateway, self.close_unused)
        self._connections.append(connection)
        return connection


_DISK_S = 60.0  # a file operation that takes longer hangs
# File operations, each one shell script. Their messages are understood, so they are those of the C locale.
_LOCALE = {"LC_ALL": "C"}
_WRITE = """\
umask 077; parent=$(dirname -- "$1") && mkdir -p -- "$parent" || exit
part=$(mktemp -- "$parent/.${1##*/}.XXXXXXXXXXXX.tmp") || exit
trap 'rm -f -- "$part"' EXIT; trap 'exit 1' HUP INT TERM
cat >"$part" && test "$(wc -c <"$part")" -eq "$3" && chmod "$2" "$part" && sync "$part" && mv -fT -- "$part" "$1"
"""
_UNPACK = "umask 077; tar -xPpmf - --no-same-owner --no-overwrite-dir"
# The same for many files: standard input is their paths ($1 bytes), ended by NUL, and a tar archive of them.
_WRITE_MANY = f"""\
umask 077; names=$(mktemp -d) || exit; rename="s,[^/]*\\$,.&.${{names##*.}}.tmp,"
trap 'xargs -0 -r rm -f -- 2>/dev/null <"$names/parts"; rm -rf -- "$names"' EXIT; trap 'exit 1' HUP INT TERM
head -c "$1" >"$names/paths" && test "$(wc -c <"$names/paths")" -eq "$1" &&
sed -z "$rename" <"$names/paths" >"$names/parts" && sed -z "h;$rename;p;x" <"$names/paths" >"$names/moves" &&
{_UNPACK} --transform "$rename" && xargs -0 -r sync -- <"$names/parts" &&
xargs -0 -r -n 2 mv -fvT -- <"$names/moves"
"""
_MOST_FILES = 100  # in one command, which says nothing until they are on the disk
_MOST_ENTRIES = 1000  # directories and links in one command, likewise
_MKDIR = 'umask "$2"; mkdir -p -- "$1"'
# Not `tail | head`, whose status is that of the last: an error in the middle would look like the end of the file.
# A FIFO or a device, which could be waited for for ever, is as if not there.
_READ = (
    'if [ -e "$1" ] && [ ! -f "$1" ]; then echo "$1: No such file or directory" >&2; exit 1; fi; '
    'head -c 0 -- "$1" && '
    'dd if="$1" bs=1M status=none iflag=skip_bytes,fullblock${3:+,count_bytes} skip="$2" ${3:+count="$3"}'
)
# Files of less than $1 bytes alone. The status of tar is 1 where a file was replaced while it was read.
_READ_MANY = """
exec 4>&1
told=$({
    { xargs -0 -r /bin/sh -c 'most=$1; shift; exec find -L "$@" -maxdepth 0 -type f -size -"${most}c" -print0' sh "$1"
      echo $? >&3
    } | { tar -cPhf - -b 1 --null --no-recursion -T - >&4; test $? -le 1; echo $? >&3; }
} 3>&1)
for status in $told; do test "$status" = 0 || exit 2; done
"""
_NAMES = 'find "$1/" -mindepth 1 -maxdepth 1 -printf "%f\\0"'
_HOME = 'getent passwd "$1" | cut -d: -f6'


class SshTransport(Transport):
    """Transport to a machine over a connection that all threads share, made when first used and again when needed."""

    def __init__(self, spec: HostSpec, pool: ConnectionPool) -> None:
        self.name = spec.name
        self.spec = spec
        self._pool = pool
        self._connecting = threading.Lock()  # one thread connects, the others wait for it
        self._link: Link | None = None
        self._closed = 0  # times

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
        with self._started(argv, timeout_s, env, drop_env, keep_env, whole=True) as process:
            return process.finish(stdin)

    def stream(self, argv: Sequence[str], *, timeout_s: float) -> Process:
        """See `Transport.stream`."""
        process = self._started(argv, timeout_s)
        try:
            process.await_start()
        except BaseException:
            process.__exit__()
            raise
        return process

    def expand(self, path: str) -> str:
        """See `Transport.expand`."""
        user, slash, rest = path.partition("/")
        if not user.startswith("~"):
            return path
        home = self._connected()[0].home if user == "~" else self._script(_HOME, user[1:]).decode().strip()
        return f"{home}{slash}{rest}" if home else path

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Transport.write`."""
        self._change(f"cannot write {path}", _WRITE, path, f"{mode:o}", str(len(data)), stdin=data)

    def write_many(
        self, files: Sequence[WholeFile], directories: Sequence[str] = (), links: Mapping[str, str] = NO_LINKS
    ) -> None:
        """See `Transport.write_many`. One command for a thousand that have no content, and one for a hundred files."""
        entries = [_entry(path, tarfile.DIRTYPE) for path in directories]
        entries += [_entry(path, tarfile.SYMTYPE, target=target) for path, target in links.items()]
        for start in range(0, len(entries), _MOST_ENTRIES):
            some = entries[start : start + _MOST_ENTRIES]
            self._change(f"cannot make {some[0][0].name} and others", _UNPACK, stdin=_archive(some))
        for start in range(0, len(files), _MOST_FILES):
            batch = files[start : start + _MOST_FILES]
            what = f"cannot write {batch[0].path} and {len(batch) - 1} more"
            paths = "".join(f"{file.path}\0" for file in batch).encode()
            packed = _archive(_entry(file.path, mode=file.mode, data=file.data) for file in batch)
            self._change(what, _WRITE_MANY, str(len(paths)), stdin=paths + packed)

    def mkdir(self, path: str, *, mode: int = 0o700) -> None:
        """See `Transport.mkdir`."""
        self._change(f"cannot make {path}", _MKDIR, path, f"{0o777 & ~mode:o}")

    def remove(self, path: str) -> None:
        """See `Transport.remove`."""
        self._change(f"cannot remove {path}", 'rm -f -- "$1"', path)

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See `Transport.read`."""
        return self._script(_READ, path, str(offset), "" if limit is None else str(limit))

    def read_many(self, paths: Iterable[str], *, limit: int = RECORD_BYTES) -> dict[str, bytes]:
        """See `Transport.read_many`."""
        wanted = "".join(f"{path}\0" for path in paths).encode()
        data = self._script(_READ_MANY, str(limit + 1), stdin=wanted, fine=_NO_FILE) if wanted else b""
        if not data:
            return {}
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                return {entry.name: file.read() for entry in archive if (file := archive.extractfile(entry))}
        except tarfile.TarError as error:
            raise BackendUnreachable(f"the files came damaged: {error}", where=self.name) from error

    def names(self, path: str) -> list[str]:
        """See `Transport.names`."""
        return sorted(os.fsdecode(self._script(_NAMES, path, fine=_NOT_THERE)).split("\0")[:-1])

    def close(self) -> None:
        """See `Transport.close`. What still runs there for us is ended."""
        self._closed += 1
        link, self._link = self._link, None  # without the lock: nobody wants to wait for a host that is being called
        if link is not None:
            link.close()

    def __repr__(self) -> str:
        return f"SshTransport({self.name})"

    def _started(self, argv: Sequence[str], timeout_s: float, *environment: Any, whole: bool = False) -> SshProcess:
        """Return a command that has been started, over a new connection where the one that there was is dead."""
        from orc.launchers.remote.ssh.link import SshProcess

        while True:
            link, fresh = self._connected()
            try:
                return SshProcess(link, argv, timeout_s, *environment, whole=whole)
            except NoSession:
                if fresh:
                    raise

    def _change(self, what: str, script: str, *arguments: str, stdin: bytes = b"") -> None:
        try:
            self._script(script, *arguments, stdin=stdin)
        except OSError as error:
            raise BackendError(f"{what}: {error.strerror}", where=self.name, hint=disk_hint(error.errno)) from error

    def _script(self, script: str, *arguments: str, stdin: bytes = b"", fine: Collection[int] = ()) -> bytes:
        """Return the output of a file operation. What fails with an error number in *fine* does not matter.

        All can be done twice, so one that met a dead connection is tried on a new one. Raises `OSError` as it happened
        there, `BackendUnreachable` for failures that no error number stands for: nothing is known then.
        """
        while True:
            link, fresh = self._connected()
            try:
                with self._started(
                    ("/bin/sh", "-c", script, "orc", *arguments), _DISK_S, _LOCALE, whole=True
                ) as process:
                    status, out, err = process.gather(stdin, patient=True)
                break
            except CommandTimeout:
                what = f"its file system has not answered for {_DISK_S:g} s"
                raise BackendUnreachable(what, where=self.name) from None
            except LinkLost:
                if fresh or link.alive:
                    raise
        problems = [_problem(line) for line in err.decode(errors="replace").splitlines()] if status else []
        if serious := [error for error in problems if error.errno and error.errno not in fine]:
            raise serious[-1]
        if status and not any(error.errno in fine for error in problems):
            what = err.decode(errors="replace").strip()[-300:] or f"exit status {status}"
            raise BackendUnreachable(f"a file operation failed there: {what}", where=self.name)
        return out

    @cached_property
    def connection(self) -> HostConnection:
        """The fabric connection to the host, which need not be open."""
        return self._pool.connection(self.spec)

    def _connected(self) -> tuple[Link, bool]:
        """Return the connection, and whether it was made just now. Raises `BackendUnreachable`."""
        with self._connecting:
            if self._link is not None and self._link.alive:
                return self._link, False
            from orc.launchers.remote.ssh.link import Link

            closed = self._closed
            link = Link(self.name, self.connection, self.spec.python)
            if self._closed != closed:
                link.close()
                raise LinkLost("the connection was closed", where=self.name)
            self._link = link
            return link, True


def _archive(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry, data in entries:
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _entry(
    path: str, kind: bytes = tarfile.REGTYPE, *, mode: int = 0o700, data: bytes = b"", target: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(data), target
    return entry, data


_ERRORS = {os.strerror(number): number for number in errno.errorcode}
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NO_FILE = (*_NOT_THERE, errno.ELOOP)


def _problem(line: str) -> OSError:
    """Return the error in the last line of a program's output."""
    *before, reason = line.split(": ")
    if reason.startswith("Wrote only "):  # as tar says it of a disk that got full in the middle of a piece
        reason = os.strerror(errno.ENOSPC)
    return OSError(_ERRORS.get(reason, 0), reason, *before[-1:])
