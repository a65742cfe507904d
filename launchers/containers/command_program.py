"""Program that is run in a container for a command or a file operation from outside, sent as text.

Standard library, Python >= 3.9. Standard input comes in frames, a length of four bytes and the data: the request in
JSON, then what the command reads, an empty frame for its end. A stream that ends without one was cut off: the command
is ended, with its process group.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import struct
import subprocess
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def take(size: int) -> bytes:
    """Return *size* bytes of standard input; fewer at its end."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            break
        data += piece
    return data


def frame() -> bytes | None:
    """Return the next frame; `None` when the stream was cut off."""
    head = take(4)
    size = struct.unpack(">I", head)[0] if len(head) == 4 else 0
    data = take(size)
    return data if len(head) == 4 and len(data) == size else None


def run(request: dict[str, Any]) -> int:
    """Run a command with the frames as its standard input."""
    env = {**os.environ, **request["env"]}
    for name in [name for name in env if name.startswith(tuple(request["drop"])) and name not in request["keep"]]:
        del env[name]
    try:
        child = subprocess.Popen(request["argv"], stdin=subprocess.PIPE, env=env, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{request['argv'][0]}: {error.strerror}\n")
        return 127

    def end() -> None:
        status = child.wait()
        os._exit(128 - status if status < 0 else status)

    threading.Thread(target=end).start()
    while True:
        data = frame()
        try:
            if data:
                child.stdin.write(data)  # type: ignore[union-attr]
                child.stdin.flush()  # type: ignore[union-attr]
            elif data is not None:
                child.stdin.close()  # type: ignore[union-attr]
        except (OSError, ValueError):
            pass  # it reads no more
        if data is None:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os._exit(1)


def write(path: str, mode: int, data: bytes) -> bytes:
    """Write a whole file, durably and in one step; parents are made, 0700."""
    parent, name = os.path.split(path)
    os.umask(0o077)
    os.makedirs(parent, exist_ok=True)
    temporary = os.path.join(parent, f".{name}.{os.urandom(6).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return b""


def read(path: str, offset: int, limit: int | None) -> bytes:
    """Return a part of a regular file."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(2, "no regular file", path)
        file.seek(offset)
        return file.read() if limit is None else file.read(limit)


def read_many(paths: list[str], limit: int) -> bytes:
    """Return the sizes (-1: no such file, or a larger one) of files in one line, and their contents."""
    sizes, contents = [], []
    for path in paths:
        try:
            data = read(path, 0, limit + 1)
        except OSError as error:
            if error.errno not in (2, 6, 20, 40):  # no file: ENOENT, ENXIO, ENOTDIR, ELOOP
                raise
            data = b"x" * (limit + 1)
        sizes.append(len(data) if len(data) <= limit else -1)
        contents.append(data if len(data) <= limit else b"")
    return json.dumps(sizes).encode() + b"\n" + b"".join(contents)


def operate(request: dict[str, Any]) -> bytes:
    """Return the answer to a file operation. Raises `OSError`."""
    name, path = request["do"], request.get("path", "")
    if name == "read":
        return read(path, request["offset"], request["limit"])
    if name == "read_many":
        return read_many(request["paths"], request["limit"])
    if name == "write":
        return write(path, request["mode"], frame() or b"")
    if name == "names":
        return json.dumps(sorted(os.listdir(path)) if os.path.isdir(path) else []).encode()
    if name == "mkdir":
        os.umask(0o777 & ~int(request["mode"]))
        os.makedirs(path, exist_ok=True)
    elif os.path.lexists(path):
        os.unlink(path)
    return b""


def main() -> int:
    """Do what the first frame says: the first byte of a file operation's answer says whether it worked."""
    request = json.loads(frame() or b"{}")
    if "argv" in request:
        return run(request)
    try:
        answer = b"+" + operate(request)
    except OSError as error:
        answer = b"-" + json.dumps([error.errno, error.strerror]).encode()
    sys.stdout.buffer.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
