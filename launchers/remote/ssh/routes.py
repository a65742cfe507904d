"""Routes to hosts: addresses, users, keys and jump hosts, as a cluster and the SSH configuration have them."""

from __future__ import annotations

import getpass
import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orc.launchers.errors import SpecError
from orc.launchers.paths import refuse_untrusted

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


_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
# [user@]host[:port]; an IPv6 address with a port is in brackets.
_HOP = re.compile(
    r"(?:(?P<user>.*)@)?(?:\[(?P<bracketed>[^]]+)\]|(?P<host>[^][:]+|[^][]*:[^][]*:[^][]*))(?::(?P<port>\d+))?"
)
_DEEPEST = 16  # files that include each other


@dataclass(frozen=True)
class Route:
    """Address, login and host keys of one host."""

    name: str
    address: str
    port: int
    user: str
    jumps: tuple[HostSpec, ...] = ()  # the first one first
    proxy_command: str | None = None
    identities: tuple[str, ...] = ()  # private key files, in order
    identities_given: bool = False  # by the configuration, not the usual names
    identities_only: bool = False
    agent: str | None = None  # socket of the agent; `None`: $SSH_AUTH_SOCK, "none": no agent
    known_hosts: tuple[str, ...] = ()  # the first one takes new keys
    host_key_name: str = ""  # what to look for there
    hash_known_hosts: bool = False

    @property
    def where(self) -> str:
        """Return its name and address for messages: ``node1 (10.0.0.1:22)``."""
        at = f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"
        return self.name if at == f"{self.name}:22" else f"{self.name} ({at})"


class Config:
    """Parsed SSH configuration files."""

    def __init__(self, text: str) -> None:
        from paramiko import SSHConfig

        self._text = text
        self._parsed = SSHConfig.from_text(text)

    def lookup(self, spec: HostSpec) -> dict[str, Any]:
        """Return the options of a host; those of *spec* itself override them."""
        from paramiko import SSHConfig

        own = {"hostname": spec.address, "port": spec.port, "user": spec.user}
        options = {key: str(value) for key, value in own.items() if value is not None}
        found = dict(self._parsed.lookup(spec.name))
        if options and "proxycommand" in found:  # which has some of them in it
            section = "\n".join([f"Host {spec.name}", *(f"{key} {value}" for key, value in options.items())])
            found = dict(SSHConfig.from_text(f"{section}\n{self._text}").lookup(spec.name))
        return {**found, **options}


def read_config(files: Sequence[str]) -> Config:
    """Parse the SSH configuration in *files*, of which those that do not exist are skipped. Raises `SpecError`."""
    from paramiko.ssh_exception import ConfigParseError

    lines: list[str] = []
    for name in files:
        path = Path(name).expanduser()
        if path.exists() or len(files) == 1:
            # Every file begins outside of all `Host` sections.
            lines += [*_lines(path, path.parent, 0), "Host *"]
    try:
        return Config("\n".join(lines))
    except (ConfigParseError, ValueError) as error:
        raise SpecError(f"the SSH configuration cannot be understood: {error}", where=", ".join(files)) from error


def resolve(spec: HostSpec, config: Config) -> Route:
    """Return the route to a host. Raises `SpecError`."""
    from paramiko.ssh_exception import CouldNotCanonicalize

    try:
        found = config.lookup(spec)
    except (CouldNotCanonicalize, ImportError) as error:
        raise SpecError(f"the SSH configuration of {spec.name} cannot be used: {error}", where=spec.name) from error
    address = found["hostname"]
    port = _port(found.get("port", "22"), spec.name)
    user = found.get("user") or getpass.getuser()
    check_destination(address, user, port, where=spec.name)
    jumps = _jumps(found.get("proxyjump") if spec.via is None else spec.via)
    command = found.get("proxycommand")
    given = tuple(found.get("identityfile", ()))
    alias = (found.get("hostkeyalias") or address).lower()
    return Route(
        name=spec.name,
        address=address,
        port=port,
        user=user,
        jumps=jumps,
        proxy_command=None if jumps or command in (None, "none") else command,
        identities=tuple(os.path.expanduser(p) for p in given if p != "none") if given else _home(_KEYS),  # noqa: PTH111
        identities_given=bool(given),
        identities_only=found.get("identitiesonly", "no").lower() == "yes",
        agent=_agent(found.get("identityagent")),
        known_hosts=(
            *_files(found.get("userknownhostsfile"), _KNOWN_HOSTS, user, address),
            *_files(found.get("globalknownhostsfile"), _GLOBAL_KNOWN_HOSTS, user, address),
        ),
        host_key_name=alias if port == 22 or "hostkeyalias" in found else f"[{alias}]:{port}",
        hash_known_hosts=found.get("hashknownhosts", "no").lower() == "yes",
    )


def _jumps(text: str | None) -> tuple[HostSpec, ...]:
    if text is None or text.strip().lower() in ("", "none"):
        return ()
    hops = []
    for hop in text.split(","):
        match = _HOP.fullmatch(hop.strip().removeprefix("ssh://").rstrip("/"))
        if match is None:
            raise SpecError(
                f"{hop!r} is not a jump host", hint="Write [user@]host[:port], several separated by commas."
            )
        port = int(match["port"]) if match["port"] else None
        hops.append(HostSpec(match["bracketed"] or match["host"], user=match["user"], port=port))
    return tuple(hops)


def _port(text: str, name: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise SpecError(f"Port {text} of {name} in the SSH configuration is not a port number")
    return int(text)


def _agent(given: str | None) -> str | None:
    if given is None or given == "SSH_AUTH_SOCK":
        return None
    if given.startswith("$"):
        return os.path.expandvars(given)
    return os.path.expanduser(given)  # noqa: PTH111 - a text, like all paths in that file


def _home(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(os.path.expanduser(path) for path in paths)  # noqa: PTH111


def _files(given: str | None, usual: Sequence[str], user: str, address: str) -> tuple[str, ...]:
    if given is None:
        return _home(usual)
    tokens = {"%%": "%", "%d": os.path.expanduser("~"), "%h": address, "%r": user, "%u": getpass.getuser()}  # noqa: PTH111
    names = re.findall(r'"([^"]*)"|(\S+)', given)
    paths = [re.sub(r"%[%dhru]", lambda m: tokens[m[0]], quoted or plain) for quoted, plain in names]
    return tuple(path for path in _home(paths) if path != "none")


def _lines(path: Path, base: Path, depth: int) -> Iterator[str]:
    """Yield the lines of a file and of the files that it includes, which paramiko does not read."""
    if depth > _DEEPEST:
        raise SpecError("SSH configuration files include each other in a circle", where=str(path))
    refuse_untrusted(path, "SSH configuration", SpecError)  # its ProxyCommand is run
    try:
        text = path.read_text(errors="surrogateescape")
    except OSError as error:
        raise SpecError(f"the SSH configuration cannot be read: {error.strerror}", where=str(path)) from error
    section = "Host *"
    for line in text.splitlines():
        words = re.match(r"\s*(\w+)(?:\s*=\s*|\s+)(.*\S)", line)
        keyword = words[1].lower() if words else ""
        if keyword in ("host", "match"):
            section = line
        if keyword != "include" or words is None:
            yield line
            continue
        for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', words[2]):
            pattern = Path(quoted or plain).expanduser()
            for included in sorted(glob.glob(str(pattern if pattern.is_absolute() else base / pattern))):
                yield from _lines(Path(included), base, depth + 1)
                yield section
