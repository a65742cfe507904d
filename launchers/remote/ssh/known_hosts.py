"""Verification of host keys (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT)."""

from __future__ import annotations

import base64
import fcntl
import fnmatch
import hmac
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import HostAccessError
from orc.launchers.strict_modes import make_private

if TYPE_CHECKING:
    from paramiko import PKey

    from orc.launchers.remote.ssh.routes import Route


@dataclass(frozen=True)
class Entry:
    """A line of a known_hosts file."""

    file: str
    line: int
    marker: str  # "", "revoked" or "cert-authority"
    kind: str  # ssh-ed25519, ...
    key: bytes

    @property
    def where(self) -> str:
        """Return ``file:line``."""
        return f"{self.file}:{self.line}"


def entries(name: str, files: Sequence[str]) -> list[Entry]:
    """Return the lines about the host called *name* (``host`` or ``[host]:port``). Raises `HostAccessError`."""
    return [entry for file in files for entry in _read(name, file)]


def key_types(known: Sequence[Entry]) -> list[str]:
    """Return the types of key by which the host is known, to be preferred."""
    kinds = [entry.kind for entry in known if not entry.marker]
    rsa = ["rsa-sha2-512", "rsa-sha2-256", "ssh-rsa"]
    return list(dict.fromkeys(name for kind in kinds for name in (rsa if kind == "ssh-rsa" else [kind])))


def check(route: Route, key: PKey, *, accept_new: bool) -> None:
    """Compare the key that the host showed with the one that is known. With *accept_new* an unknown one is remembered.

    A key that differs from the known one is always refused. Raises `HostAccessError`.
    """
    if _is_known(route, key):
        return
    authorities = [e for e in entries(route.host_key_name, route.known_hosts) if e.marker == "cert-authority"]
    if authorities:
        raise HostAccessError(
            f"it is known by its certificate authority alone ({authorities[0].where}), which orc cannot check",
            where=route.where,
            hint=f"Its key is {key.get_name()} {key.fingerprint}. When that is right, add it to {_own(route)}; "
            f"`ssh-keyscan -p {route.port} {route.address}` prints the line.",
        )
    if not accept_new:
        raise HostAccessError(
            f"its host key is not known: {key.get_name()} {key.fingerprint}",
            where=route.where,
            hint=f"Connect once with `ssh {route.name}` and compare the fingerprint, "
            "or set `host_keys: accept-new` in the options of the cluster.",
        )
    _remember(route, key)


def _is_known(route: Route, key: PKey) -> bool:
    """Return whether the key is the known one; false when there is none. Raises `HostAccessError` for another."""
    known = entries(route.host_key_name, route.known_hosts)
    blob = key.asbytes()
    for entry in known:
        if entry.marker == "revoked" and entry.key == blob:
            raise HostAccessError(
                f"its host key is revoked: {key.fingerprint}, see {entry.where}",
                where=route.where,
                hint="The key may be stolen. Do not connect; ask the host's administrator.",
            )
    plain = [entry for entry in known if not entry.marker]
    if any(entry.key == blob for entry in plain):
        return True
    if plain:
        entry = next((e for e in plain if e.kind == key.get_name()), plain[0])
        raise HostAccessError(
            f"its host key has changed: {key.get_name()} {key.fingerprint} is not the one in {entry.where}",
            where=route.where,
            hint="Either the host was installed anew, or an attacker answers. Ask its administrator. If it is new, "
            f"forget the old key with `ssh-keygen -R '{route.host_key_name}' -f {entry.file}` and connect again.",
        )
    return False


def _remember(route: Route, key: PKey) -> None:
    """Add the key of a new host, once, however many processes do the same now."""
    from paramiko import HostKeys

    file = _own(route)
    if file == os.devnull:
        return
    path = Path(file)
    try:
        make_private(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "rb+") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            if _is_known(route, key):
                return  # by somebody who was faster
            size = opened.seek(0, os.SEEK_END)
            if size:
                opened.seek(size - 1)
            ends_well = not size or opened.read(1) == b"\n"
            name = HostKeys.hash_host(route.host_key_name) if route.hash_known_hosts else route.host_key_name
            line = f"{name} {key.get_name()} {key.get_base64()}\n"
            os.write(descriptor, (line if ends_well else f"\n{line}").encode())
            os.fsync(descriptor)
    except OSError as error:
        raise HostAccessError(
            f"its host key cannot be remembered: {error.strerror}",
            where=file,
            hint="Make the file writable, or set UserKnownHostsFile in ~/.ssh/config.",
        ) from error


def _own(route: Route) -> str:
    return route.known_hosts[0] if route.known_hosts else os.devnull


def _read(name: str, file: str) -> Iterator[Entry]:
    try:
        text = Path(file).read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise HostAccessError(f"the known host keys cannot be read: {error.strerror}", where=file) from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0)[1:] if words[0].startswith("@") else ""
        if len(words) < 3 or not _matches(name, words[0]):
            continue
        try:
            yield Entry(file, number, marker, words[1], base64.b64decode(words[2], validate=True))
        except ValueError as error:
            raise HostAccessError(
                "a known host key is damaged", where=f"{file}:{number}", hint="Remove the line, and connect again."
            ) from error


def _matches(name: str, patterns: str) -> bool:
    """Return whether the first field of a line is about *name*."""
    if patterns.startswith("|"):
        from paramiko import HostKeys

        try:
            return hmac.compare_digest(HostKeys.hash_host(name, salt=patterns).encode(), patterns.encode())
        except (AssertionError, ValueError):  # its salt is damaged
            return False
    found = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        # Only * and ? are special there; a bracket is part of [host]:port.
        if fnmatch.fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]")):
            if negated:
                return False
            found = True
    return found
