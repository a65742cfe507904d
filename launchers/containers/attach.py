"""A command in a container with the streams of this process: what the program of a `NodeEntry` does."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence

from orc.launchers.containers.transport import COMMAND_PROGRAM, PIECE, Channel, ContainerProcess, command_request
from orc.launchers.errors import LaunchError


def attach(start: Callable[[Sequence[str]], Channel], python: str, words: Sequence[str]) -> int:
    """Run a command that *start* starts by way of `containers.command_program`; returns its exit status."""
    channel = start(COMMAND_PROGRAM.argv(python))
    with ContainerProcess(channel, command_request(words), threading.TIMEOUT_MAX, words[0]) as process:

        def feed() -> None:
            try:
                while data := os.read(0, PIECE):
                    process.write(data)
                process.close_stdin()
            except (LaunchError, OSError):
                return  # it has ended

        threading.Thread(target=feed, daemon=True).start()
        while data := process.read(PIECE):
            os.write(1, data)
        status, _, errors = process.gather()
        os.write(2, errors.encode())
        return status


def attach_terminal(channel: Channel, resize: Callable[[int, int], None]) -> int:
    """Show a command that has a terminal over there at this one; returns its exit status.

    *resize* takes columns and lines.
    """
    import termios
    import tty

    def resized(*_: object) -> None:
        resize(*shutil.get_terminal_size())

    def feed() -> None:
        while data := os.read(0, PIECE):
            channel.send(data)
        channel.send(b"\x04")  # the end, as a terminal says it

    saved = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        if saved:
            tty.setraw(0)
            signal.signal(signal.SIGWINCH, resized)
        resized()
        threading.Thread(target=feed, daemon=True).start()
        while (said := channel.receive())[0] != "end":
            os.write(1, said[1])
        return int(said[1])
    finally:
        if saved:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)
