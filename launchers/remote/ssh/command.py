"""Command lines for hosts, which any login shell reads alike, and what tells where their output begins."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from orc.launchers.errors import BackendError
from orc.launchers.remote.ssh.watchdog import VARIABLE

NOT_FOUND, NOT_EXECUTABLE = 127, 126
# A session of its own, whose leader is the shell behind it, as it is where sshd starts the shell; `~` is root's home.
_AS_ROOT = ("sudo", "-n", "-H", "setsid", "-w")
_DECODE = 'eval "exec $(printf %b "$1")"'
# Says who leads the command's processes, on both streams, because a login may have printed something before. The words
# are put together there: a shell that shows what it runs must not show them. Waits for the command, to tell its signal.
_LEAD = f"""\
say() {{ printf '\\n%s:%s:%s:%s:\\n' orc "$token" $$ "$1"; }}
token=$1; shift
trap : HUP INT TERM
case $1 in */*) test -x "$1" ;; *) command -v -- "$1" >/dev/null 2>&1 ;; esac || {{
test -e "$1" && set {NOT_EXECUTABLE} || set {NOT_FOUND}; say $1; exit $1; }}
say 0; say 0 >&2; exec 3>&2 2>/dev/null
"""
_DROP = """\
for name in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z_0-9]*\\)=.*/\\1/p'); do
case $name in {keep}) ;; {drop}) unset $name ;; esac; done
"""


def command_line(
    argv: Sequence[str],
    token: str,
    env: Mapping[str, str],
    drop_env: Sequence[str] = (),
    keep_env: Sequence[str] = (),
    *,
    mark_end: bool = False,
    sudo: bool = False,
) -> str:
    """Return the command line for *argv*, run as root with *sudo*; `marks` recognises its start (and end)."""
    script = _LEAD
    if drop_env:
        keep = "|".join(shlex.quote(name) for name in keep_env) or "''"
        script += _DROP.format(keep=keep, drop="|".join(f"{shlex.quote(prefix)}*" for prefix in drop_env))
    # The same again where the output ends: what the command leaves behind may hold it open.
    end = "; status=$?; say 0; say 0 >&3; exit $status" if mark_end else ""
    settings = shlex.join(f"{name}={value}" for name, value in env.items())
    script += f'/usr/bin/env {VARIABLE}="$token-$$" {settings} "$@" 2>&3 3>&-{end}'
    return any_shell((*(_AS_ROOT if sudo else ()), "/bin/sh", "-c", script, "orc", token, *argv))


def any_shell(argv: Sequence[str]) -> str:
    """Return *argv* as one line that sh, csh and fish read alike: no newline, exclamation mark or backslash in it."""
    line = shlex.join(argv)
    if not re.search(r"[\n!\\]", line):
        return f"exec {line}"
    escaped = re.sub(r"[\n!\\]", lambda match: f"\\0{ord(match[0]):03o}", line)
    return f"exec /bin/sh -c {shlex.quote(_DECODE)} orc {shlex.quote(escaped)}"


def marks(token: str) -> re.Pattern[bytes]:
    """Return the pattern of what stands around the output of a command: its process group, and why it did not start."""
    return re.compile(rb"\norc:%s:(\d+):(\d+):\n" % token.encode())


def unstarted(program: str, status: int, where: str) -> BackendError:
    """Return the error about a *program* that did not start, by the *status* that `marks` has found."""
    if status == NOT_FOUND:
        name = PurePosixPath(program).name
        python = "Set `python:` of the cluster or the host to a Python 3.9 or newer that is there."
        hint = python if name.startswith("python") else f"Install {name} there."
        return BackendError(f"{program}: command not found", where=where, hint=hint)
    return BackendError(f"{program} could not be started: Permission denied", where=where)
