"""Records: JSON files of the attempt directory, written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

FORMAT = 1
TAIL_LINES = 40
TAIL_BYTES = 8192
# What comes to a host for one attempt alone and must not stay.
CONFIDENTIAL = ("secrets.json", "link.json")
RECORD_BYTES = 16 << 20  # an agent's configuration names each host and variable of a large job
NODE_RECORD_BYTES = 1 << 20  # of what a node writes of itself
PROGRESS_BYTES = 64 << 10  # of what a training writes, which is in a heartbeat: a larger one would be no sign of life
MOST_NODES = 10_000
_LATEST = 1e11  # seconds since the epoch; the year 5138
_TEXT = 4096
_WHOLE_TEXT = slice(_TEXT)
_MOST_FIELDS = 100  # of a record in a record
# What fields mean in whichever record they are: a whole number in a range, seconds, or a text of so many characters.
_WHOLE = {
    "nnodes": (1, MOST_NODES),
    "nproc": (1, MOST_NODES),
    "node": (-1, MOST_NODES),
    "lost_node": (0, MOST_NODES),
    "restart": (0, 1 << 31),
    "pid": (0, 1 << 31),
    "rank": (0, MOST_NODES * 1000),
    "exit_code": (-(1 << 31), 1 << 31),
    "exit_status": (-(1 << 31), 1 << 31),
}
_SECONDS = ("at", "started_at", "ended_at", "notice_s", "grace_s")
_TEXTS = {
    "host": 255,
    "name": 255,
    "owner": 255,
    "marker": 255,
    "pid_start": 64,
    "boot_id": 64,
    "state": 64,
    "outcome": 64,
    "signal": 64,
    "reason": _TEXT,
    "stall": _TEXT,
    "log_tail": TAIL_BYTES,
}
_PARTS = ("first_failure", "progress", "backend")  # records in a record: of plain values, and nothing deeper
_NODES = ("lost_nodes", "components")  # whole numbers, of nodes or how many
_DEEPER = (*_PARTS, "ranks", "hosts", "secrets")
_MAY_BE_UNKNOWN = ("rank", "exit_code", "signal", "lost_node", "first_failure")
_RANK = re.compile(r"[0-9]{1,7}")
_FIELDS = {*_WHOLE, *_SECONDS, *_TEXTS, *_NODES, *_DEEPER}


def read_json(path: str, limit: int = RECORD_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in *path*; `None` when there is no such file, or no object of *limit* bytes in it.

    For those who run in the job's own account; others take it as `checked`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would never open otherwise
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):  # ENXIO: a device or a socket
            return None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        with open(fd, "rb", closefd=False) as file:
            data = file.read(limit + 1)
            return parse_object(data) if len(data) <= limit else None
    finally:
        os.close(fd)


def parse_record(data: bytes) -> dict[str, Any] | None:
    """Return the record that *data* is, `checked`; `None` for what is no JSON object, or larger than `RECORD_BYTES`.

    Whoever runs in a job's account can write anything in the place of its records: all others read them through here.
    """
    found = parse_object(data)
    return None if found is None else checked(found)


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object that *data* is, NaN and infinities as `None`; `None` for anything else."""
    try:
        found = (
            json.loads(data.decode(), parse_constant=_unknown, parse_int=_whole, parse_float=_real)
            if len(data) <= RECORD_BYTES
            else None
        )
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def checked(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return *record* without fields whose values cannot be, and with texts no longer than they may be.

    Fields that may be unknown are `None` instead. Of others numbers and texts are kept.
    """
    found = {}
    for name, value in record.items():
        known = _part(value) if name in _PARTS else _known(name, value)
        if known is not None or name in _MAY_BE_UNKNOWN or (value is None and name not in _FIELDS):
            found[name] = known
    return found


def _part(value: Any) -> dict[str, Any] | None:
    """Return a record in a record: it is kept in the ledger as it is, so it has few fields, and no deeper ones."""
    if not isinstance(value, dict):
        return None
    found = {}
    for name, own in list(value.items())[:_MOST_FIELDS]:
        known = _known(name, own) if name in _FIELDS and name not in _DEEPER else plain(own)
        if known is not None or name in _MAY_BE_UNKNOWN or (own is None and name not in _FIELDS):
            found[clean_text(name, slice(255))] = known
    return found


def plain(value: Any) -> Any:
    """Return a number or a text, which are what ledgers and answers take; `None` for anything else."""
    if isinstance(value, str):
        return clean_text(value)
    return value if isinstance(value, (bool, int, float)) else None


def _known(name: str, value: Any) -> Any:
    """Return *value* as a field *name* can have it, else `None`."""
    if name in _WHOLE:
        low, high = _WHOLE[name]
        return value if type(value) is int and low <= value <= high else None
    if name in _SECONDS:
        return value if type(value) in (int, float) and 0 <= value <= _LATEST else None
    if name in _TEXTS:
        end = slice(-_TEXTS[name], None) if name == "log_tail" else slice(_TEXTS[name])
        return clean_text(value, end) if isinstance(value, str) else None
    if name in _NODES:
        nodes = value if isinstance(value, list) else []
        return [node for node in nodes if type(node) is int and 0 <= node <= MOST_NODES][:MOST_NODES]
    if name == "hosts":
        hosts = value if isinstance(value, list) else []
        return [_part(host) for host in hosts[:MOST_NODES] if isinstance(host, dict)]
    if name == "ranks":
        ranks = list(value.items())[:MOST_NODES] if isinstance(value, dict) else []
        return {rank: _part(end) for rank, end in ranks if _RANK.fullmatch(rank) and isinstance(end, dict)}
    if name == "secrets":
        names = value if isinstance(value, list) else []
        return [clean_text(secret, slice(255)) for secret in names[:_MOST_FIELDS] if isinstance(secret, str)]
    return plain(value)


def clean_text(value: str, end: slice = _WHOLE_TEXT) -> str:
    """Return so much of a text as one that a database takes: without NUL and halves of surrogate pairs."""
    return value[end].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _unknown(constant: str) -> None:
    """NaN and infinities are no numbers of JSON, and a service could not pass them on; a loss may well be one."""


def _whole(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("a number of more than 20 digits")
    return int(digits)


def _real(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None  # 1e999 is an infinity without its name


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot sync a directory
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_json(path: str, data: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write *data* so that readers see all of it or none; *durable* also survives a power cut."""
    # In containers that share a directory every agent has the number 1.
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.tmp"
    try:
        _write(temporary, data, durable=durable)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    if durable:
        _sync_directory(os.path.dirname(path))


def _write(path: str, data: Mapping[str, Any], *, durable: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(data, file, ensure_ascii=False)
        file.write("\n")
        file.flush()
        if durable:
            os.fsync(file.fileno())


def refresh_json(path: str, data: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write a record that is written again and again (`write_json`): on a full disk, over the last one."""
    try:
        write_json(path, data, durable=durable)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not os.path.exists(path):
            raise
        content = json.dumps(data, ensure_ascii=False).encode()
        with open(path, "r+b", buffering=0) as file:
            file.write(content + b" " * (os.fstat(file.fileno()).st_size - len(content) - 1) + b"\n")


def create_json(path: str, data: Mapping[str, Any]) -> bool:
    """Like `write_json`, but exactly one of all creators gets True; link(2) is atomic on network file systems too."""
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.new"
    try:
        _write(temporary, data, durable=True)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        remove(temporary)
    _sync_directory(os.path.dirname(path))
    return True


def remove(path: str) -> None:
    """Unlink *path* if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def log_tail(path: str, start: int = 0, secrets: Sequence[str] = ()) -> str:
    """Return the last lines of a log from byte *start* on, without values of *secrets*: 40 lines and 8 KiB at most."""
    if secrets:
        from orc.launchers.agent.masking import longest, masked
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(start, size - TAIL_BYTES)
            # A value that begins before the tail and reaches into it is masked, too.
            reach = min(begin - start, longest(secrets)) if secrets else 0
            file.seek(begin - reach)
            before, data = file.read(reach).decode("utf-8", "replace"), file.read(TAIL_BYTES)
    except OSError:
        return ""
    text = data.decode("utf-8", "replace")
    if secrets:
        text = masked(before + text, secrets, len(before))
    lines = text.splitlines()
    if begin > start and len(lines) > 1:
        lines = lines[1:]  # the first one is cut
    return "\n".join(lines[-TAIL_LINES:])
