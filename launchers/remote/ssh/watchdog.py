"""Runs on a host beside the commands of one SSH connection, and ends them when the other side falls silent.

sshd leaves commands without a terminal running when their connection ends, and a link that is cut ends no connection.
So both sides say something every few seconds. Sent over the connection; standard library alone, Python 3.9.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

TICK_S = 2.0
VARIABLE = "ORC_SSH_COMMAND"  # in the environment of commands: the connection's token and the process group
_KILL_AFTER_S = 0.5  # after SIGTERM
_LATE_S = 0.5  # a command that was just being started when the connection ended shows up so late


def groups(token: str) -> set[int]:
    """Return the process groups of this connection's commands whose leaders still run."""
    found = set()
    mark = f"{VARIABLE}={token}-".encode()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                marks = [entry for entry in file.read().split(b"\0") if entry.startswith(mark)]
            group = int(marks[0][len(mark) :]) if marks else 0
            if group and os.getpgid(int(name)) == group and os.path.exists(f"/proc/{group}"):
                found.add(group)
        except (OSError, ValueError):
            continue  # somebody else's, or it has just ended
    return found


def kill(group: int, number: int) -> None:
    """Send a signal to a process group; one that has ended is fine."""
    try:
        os.killpg(group, number)
    except OSError:
        return


def end_all(token: str) -> None:
    """End all commands of the connection."""
    began = seen = time.monotonic()
    while time.monotonic() - seen < _LATE_S:
        for group in groups(token):
            seen = time.monotonic()
            kill(group, signal.SIGTERM if seen - began < _KILL_AFTER_S else signal.SIGKILL)
        time.sleep(0.2)


def watch(silence_s: float) -> None:
    """Answer ticks with ticks and end single commands; return when the other side is gone."""
    heard = said = time.monotonic()
    doomed: dict[int, float] = {}  # process group -> when it gets SIGKILL
    pending = b""
    while True:
        began = time.monotonic()
        ready = select.select([0], [], [], 0.1 if doomed else TICK_S / 2)[0]
        now = time.monotonic()
        if ready:
            data = os.read(0, 4096)
            if not data:
                return
            heard = now
            *lines, pending = (pending + data).split(b"\n")
            for group in (int(line) for line in lines if line):
                kill(group, signal.SIGTERM)
                doomed[group] = now + _KILL_AFTER_S
        elif now - began > TICK_S:
            heard = now  # it was this machine that was stopped, or asleep
        for group in [group for group, due in doomed.items() if now > due]:
            kill(group, signal.SIGKILL)
            del doomed[group]
        if now - heard > silence_s:
            return
        if now - said > TICK_S and select.select([], [1], [], 0)[1]:
            os.write(1, b"\n")
            said = now


def main() -> None:
    """``TOKEN SILENCE_S``: print a greeting and watch."""
    token, silence_s = sys.argv[1], float(sys.argv[2])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, json.dumps({"home": os.path.expanduser("~")}).encode() + b"\n")
    try:
        watch(silence_s)
    except OSError:
        pass  # the pipe to sshd is broken: gone as well
    end_all(token)
