"""Logs of a foreground launch's ranks: what a rank writes goes to its log, and to this terminal where it is copied."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path

from orc.launchers.agent.processes import background
from orc.launchers.errors import LaunchError

Streams = int | Mapping[int, int]  # 0 none, 1 stdout, 2 stderr, 3 both; or one such number for each local rank


def chosen(streams: Streams, index: int) -> int:
    """Return the streams of the local rank *index*: 0 none, 1 stdout, 2 stderr, 3 both."""
    return streams if isinstance(streams, int) else streams.get(index, 0)


def open_tee(path: Path, copied: int, redirected: int) -> tuple[dict[int, int], int | None]:
    """Return the ends that a rank writes to, by stream, and the process id of the small process that copies, if any.

    Args:
        path: the rank's log.
        copied: streams that go to the same stream of this process as well.
        redirected: streams that go to the log alone.

    Raises:
        LaunchError: the log cannot be opened.
    """
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise LaunchError(f"the log cannot be opened: {error.strerror}", where=str(path)) from None
    ends: dict[int, int] = {}
    pipes: dict[int, int] = {}
    for stream in (1, 2):
        if redirected & stream:
            ends[stream] = os.dup(log)
        elif copied & stream:
            read, ends[stream] = os.pipe()
            pipes[read] = stream

    def copy() -> None:
        for fd in ends.values():
            os.close(fd)
        _copy(pipes, log)

    copier = background(copy) if pipes else None
    for fd in (*pipes, log):
        os.close(fd)
    return ends, copier


def _copy(pipes: Mapping[int, int], log: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the ranks react; this copies what they say about it
    poll = select.poll()
    for fd in pipes:
        poll.register(fd, select.POLLIN)
    left = len(pipes)
    while left:
        for fd, _ in poll.poll():
            data = os.read(fd, 65536)
            if not data:
                poll.unregister(fd)
                left -= 1
                continue
            for target in (pipes[fd], log):
                _write_all(target, data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
