"""Records: JSON files of the attempt directory, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

FORMAT = 1
TAIL_LINES = 40
TAIL_BYTES = 8192


def read_json(path: str) -> dict[str, Any] | None:
    """Return the JSON object in *path*; `None` when there is no such file (or, on a crashed disk, no object in it)."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot sync a directory
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_json(path: str, data: Mapping[str, Any], *, durable: bool = True, mode: int = 0o600) -> None:
    """Write *data* so that readers see all of it or none; *durable* also survives a power cut."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        _write(temporary, data, durable=durable, mode=mode)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    if durable:
        _sync_directory(os.path.dirname(path))


def _write(path: str, data: Mapping[str, Any], *, durable: bool, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
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
        _write(temporary, data, durable=True, mode=0o600)
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
    """Return the last lines of a log from byte *start* on, without the values of *secrets*: 40 lines and 8 KiB at
    most.
    """
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
