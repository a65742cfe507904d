"""Public-key authentication: the keys in their order, and the reasons why none of them worked."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import HostAccessError, LinkLost

if TYPE_CHECKING:
    from paramiko import PKey, Transport
    from paramiko.agent import AgentKey, AgentSSH

    from orc.launchers.remote.ssh.routes import Route

_SMALLEST_TRIES = "the host closed the connection after {} keys: set IdentityFile and `IdentitiesOnly yes` for it"


def log_in(transport: Transport, route: Route) -> None:
    """Authenticate as the route's user, with a key and without a prompt.

    Raises `HostAccessError` that says what is wrong with every key there is, `LinkLost`.
    """
    from paramiko import AuthenticationException, BadAuthenticationType, SSHException

    notes: list[str] = []
    tried = 0
    agent = _agent(route, notes)
    try:
        for label, key in _candidates(route, agent, notes):
            try:
                wanted = transport.auth_publickey(route.user, key)
            except BadAuthenticationType as error:
                raise _refused(route, [f"the host takes no keys, only {', '.join(error.allowed_types)}"]) from None
            except AuthenticationException as error:
                tried += 1
                if transport.is_active():
                    notes.append(f"{label}: not accepted by the host")
                    continue
                if "timeout" in str(error).lower():
                    raise LinkLost("it did not answer while logging in", where=route.where) from None
                raise _refused(route, [*notes, _SMALLEST_TRIES.format(tried)]) from None
            except (SSHException, EOFError, OSError) as error:
                if not transport.is_active() and tried > 2:
                    raise _refused(route, [*notes, _SMALLEST_TRIES.format(tried + 1)]) from None
                if not transport.is_active():
                    raise LinkLost(f"the connection was cut while logging in: {error}", where=route.where) from error
                notes.append(f"{label}: {error}")  # an agent that does not sign
                continue
            if wanted:
                raise _refused(route, [f"after the key it also wants {', '.join(wanted)}, which orc cannot give"])
            return
    finally:
        if agent is not None:
            with suppress(OSError):
                agent._close()
    raise _refused(route, notes)


def _refused(route: Route, notes: list[str]) -> HostAccessError:
    listed = "".join(f"\n  - {note}" for note in notes) or "\n  - there is no key: make one with `ssh-keygen`"
    who = f"{route.user}@{route.name}"
    return HostAccessError(
        f"the login of {route.user} failed:{listed}",
        where=route.where,
        hint=f"`ssh -o BatchMode=yes {who} true` must work; `ssh-copy-id {who}` adds your key there.",
    )


def _agent(route: Route, notes: list[str]) -> AgentSSH | None:
    """Return the connection to the SSH agent, if there is one."""
    import socket

    from paramiko import SSHException
    from paramiko.agent import AgentSSH

    path = route.agent or os.environ.get("SSH_AUTH_SOCK")
    if not path or path == "none":
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)  # some ask their owner before they sign
    agent = AgentSSH()
    try:
        connection.connect(path)
        agent._connect(connection)  # what paramiko.Agent does with $SSH_AUTH_SOCK
    except (OSError, SSHException) as error:
        connection.close()
        notes.append(f"the SSH agent at {path} does not answer: {error}")
        return None
    return agent


def _candidates(route: Route, agent: AgentSSH | None, notes: list[str]) -> Iterator[tuple[str, PKey]]:
    """Yield keys in the order of OpenSSH: those of the agent that are configured, its others, then files.

    What cannot be used is noted. A file whose key the agent holds is not read: it may be encrypted.
    """
    held: dict[bytes, AgentKey] = {key.asbytes(): key for key in (agent.get_keys() if agent is not None else ())}
    files = [Path(name) for name in route.identities]
    public = {path: _public(path) for path in files}
    configured = [held[blob] for path in files if (blob := public[path]) in held]
    for key in configured:
        yield _label(key), key
    if not route.identities_only:
        for key in held.values():
            if key not in configured:
                yield _label(key), key
    for path in files:
        if public[path] in held:
            continue
        loaded = _load(path, route, notes)
        if loaded is not None:
            yield str(path), loaded


def _label(key: AgentKey) -> str:
    comment = getattr(key, "comment", "")
    return f"{key.get_name()} {comment or ''}".strip() + " of the SSH agent"


def _public(path: Path) -> bytes:
    """Return the public half of a key file, from the file beside it."""
    import base64

    name = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    try:
        return base64.b64decode(name.read_text().split()[1], validate=True)
    except (OSError, IndexError, ValueError):
        return b""  # none, or not one: then the private key itself is read


def _load(path: Path, route: Route, notes: list[str]) -> PKey | None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from paramiko import PasswordRequiredException, PKey, SSHException
    from paramiko.pkey import UnknownKeyType

    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO) and path.stat().st_uid == os.getuid():
            notes.append(f"{path}: can be read by others (mode {mode & 0o777:04o}): chmod 600 {path}")
            return None
        return PKey.from_path(path)
    except FileNotFoundError:
        if route.identities_given:
            notes.append(f"{path}: no such file")
    except OSError as error:
        notes.append(f"{path}: {error.strerror}")
    except (PasswordRequiredException, TypeError):  # the latter is how `cryptography` asks for a passphrase
        notes.append(f"{path}: encrypted, and no SSH agent holds it: run `ssh-add {path}`")
    except (UnknownKeyType, UnsupportedAlgorithm):
        notes.append(f"{path}: a type of key that is not supported (ed25519, ecdsa and rsa are); use an SSH agent")
    except (SSHException, ValueError) as error:
        if path.suffix == ".pub":
            notes.append(f"{path}: a public key whose private half no SSH agent holds")
        else:
            notes.append(f"{path}: not a private key that can be read ({error})")
    return None
