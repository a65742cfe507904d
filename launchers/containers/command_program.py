"""Program that is run in a container for a command or a file operation from outside, and sent there for it.

Standard library, Python >= 3.9. Standard input comes in frames, a length of four bytes and the data: the request in
JSON, then what the command reads, an empty frame for its end. A stream that ends without one was cut off: the command
is ended, with its process group.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading

from orc.launchers.remote import files

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


def operate(request: dict[str, Any]) -> bytes:
    """Return the answer to a file operation. Raises `OSError`."""
    name, path = request["do"], request.get("path", "")
    os.umask(0)  # the modes are those that are asked for
    if name == "read":
        return files.read_range(path, request["offset"], request["limit"])
    if name == "read_many":  # the sizes in one line, and the contents
        found = files.read_existing(request["paths"], request["limit"])
        sizes = {path: len(data) for path, data in found.items()}
        return b"\n".join([json.dumps(sizes).encode(), b"".join(found.values())])
    if name == "names":
        return json.dumps(files.names(path)).encode()
    if name == "write":
        files.write_file(path, frame() or b"", request["mode"])
    elif name == "mkdir":
        files.make_directories(path, request["mode"])
    else:
        files.remove(path)
    return b""


def main() -> None:
    """Do what the first frame says: the first byte of a file operation's answer says whether it worked."""
    request = json.loads(frame() or b"{}")
    if "argv" in request:
        sys.exit(run(request))
    try:
        answer = b"+" + operate(request)
    except OSError as error:
        answer = b"-" + json.dumps([error.errno, error.strerror]).encode()
    sys.stdout.buffer.write(answer)
