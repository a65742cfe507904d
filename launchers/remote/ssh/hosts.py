"""Address of one machine, the way to it, and the command line of OpenSSH's client that takes it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from orc.launchers.errors import SpecError

# A ProxyCommand and a `Match exec` get these names through a shell. Refused is what OpenSSH refuses, in user names also
# `$` and blanks, of which it lets some pass.
_SHELL = frozenset("'`\"$;&<>|(){}")


def is_host(text: str) -> bool:
    """Return whether *text* may be the name or address of a host."""
    return _is_harmless(text) and "\\" not in text


def is_user(text: str) -> bool:
    r"""Return whether *text* may be the name of a user (``me``, ``me@REALM``, ``DOMAIN\me``)."""
    return _is_harmless(text) and not text.endswith("\\")


def _is_harmless(text: str) -> bool:
    blank = any(character.isspace() for character in text)
    return bool(text) and text.isprintable() and not blank and not text.startswith("-") and _SHELL.isdisjoint(text)


def check_destination(host: str | None, user: str | None, port: int | None, *, where: str = "") -> None:
    """Raise `SpecError` for a host, user or port that must not reach a command line, wherever it has come from."""
    if host is not None and not is_host(host):
        raise SpecError(f"{host!r} is not the name of a host", where=where)
    if user is not None and not is_user(user):
        raise SpecError(f"{user!r} is not the name of a user", where=where)
    if port is not None and not 0 < port < 65536:
        raise SpecError(f"{port} is not a port number", where=where)


@dataclass(frozen=True)
class HostSpec:
    """Name and login of one machine. `None` is looked up in the SSH configuration under `name`. Raises `SpecError`."""

    name: str  # what it is called in the cluster, and the name to look up in ~/.ssh/config
    address: str | None = None
    user: str | None = None
    port: int | None = None
    via: str | None = None  # jump hosts: [user@]host[:port], several separated by commas, the first one first
    python: str | None = None  # interpreter (3.9 or newer) for orc's own needs there; python3 if there is no such

    def __post_init__(self) -> None:
        check_destination(self.name, self.user, self.port)
        check_destination(self.address, None, None, where=self.name)


@dataclass(frozen=True)
class ConnectOptions:
    """Options of connections to the machines of one cluster."""

    host_keys: str = "strict"  # or accept-new: remember the key of a host that was never seen. Changed keys: never
    ssh_config: str | None = None  # instead of the user's and the system's
    connect_timeout_s: float = 10.0  # for each step of connecting; also the silence after which a connection is dead
    sudo: bool = False  # everything runs as root; its sudo must not ask for a password

    def config_files(self) -> tuple[str, ...]:
        """Return the SSH configuration files to read, in order; the first value found counts."""
        given = self.ssh_config or os.environ.get("ORC_SSH_CONFIG")
        return (given,) if given else ("~/.ssh/config", "/etc/ssh/ssh_config")


def ssh_argv(host: HostSpec, access: ConnectOptions, *, terminal: bool) -> tuple[str, ...]:
    """``ssh`` with the options that *host* is reached with, up to and with its name."""
    argv = ["ssh"]
    # As in `ConnectOptions`: one file instead of the user's and the system's.
    if config := access.ssh_config or os.environ.get("ORC_SSH_CONFIG"):
        argv += ["-F", os.path.expanduser(config)]  # noqa: PTH111 - a text
    checking = "accept-new" if access.host_keys == "accept-new" else "yes"
    timeout = max(1, round(access.connect_timeout_s))
    argv += ["-o", f"StrictHostKeyChecking={checking}", "-o", f"ConnectTimeout={timeout}", "-o", "LogLevel=ERROR"]
    # No person is there to answer a question, or to notice that the host has gone.
    alone = ("BatchMode=yes", f"ServerAliveInterval={timeout}", "ServerAliveCountMax=2")
    argv += [] if terminal else [word for option in alone for word in ("-o", option)]
    argv += ["-o", f"HostName={host.address}"] if host.address else []
    argv += ["-l", host.user] if host.user else []
    argv += ["-p", str(host.port)] if host.port else []
    argv += ["-J", host.via] if host.via else []
    return (*argv, "-t" if terminal else "-T", host.name, *(("sudo", "-n", "-H") if access.sudo else ()))
