"""Values of secrets, looked up at submission and handed straight to the backend; never stored, shown or logged."""

from __future__ import annotations

import importlib
import importlib.util
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from orc.launchers.agent.masking import masked
from orc.launchers.errors import SpecError
from orc.launchers.paths import config_dir

KEYRING_SERVICE = "orc"
_MAX_BYTES = 64 * 1024


def resolve_secrets(
    names: Iterable[str], env: Mapping[str, str] | None = None, directory: Path | None = None
) -> dict[str, str]:
    """The value of every name, from the first of: the environment, the file *directory*/NAME, the keyring.

    The keyring is asked when the Python package `keyring` is installed (service ``orc``, user name NAME). Raises
    `SpecError` that names all that are missing, or a file that others could read.
    """
    environment = os.environ if env is None else env
    files = config_dir() / "secrets" if directory is None else directory
    values: dict[str, str] = {}
    missing: list[str] = []
    for name in names:
        # An empty value is taken for a missing one: nothing but a mistake makes an empty secret.
        value = environment.get(name) or read_private(files / name, f"secret {name}") or _from_keyring(name)
        if value:
            values[name] = value
        else:
            missing.append(name)
    if missing:
        one = len(missing) == 1
        name = missing[0] if one else "NAME"
        raise SpecError(
            f"{'the secret' if one else 'the secrets'} {', '.join(missing)} {'has' if one else 'have'} no value",
            hint=f"set the environment variable, or write the value to {files}/{name} with mode 0600"
            + (f", or run: keyring set {KEYRING_SERVICE} {name}" if _has_keyring() else ""),
        )
    return values


def redact(text: str, values: Iterable[str]) -> str:
    """*text* with ``***`` for every secret value, in all its forms."""
    return masked(text, values)


def read_private(path: Path, what: str) -> str | None:
    """Return the content of a private file without its last line end; `None` when there is no such file.

    *what* is its name in errors, which never show the content. Raises `SpecError` for a file that others could read.
    """
    try:
        # One descriptor for the checks and the reading: the file cannot be exchanged in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError(f"the {what} cannot be read: {error.strerror}", where=str(path)) from None
    try:
        _check_private(path, what, os.fstat(descriptor))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(_MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MAX_BYTES:
        raise SpecError(f"the {what} is larger than {_MAX_BYTES >> 10} KiB", where=str(path))
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"  # refused below, like any other value that no environment variable can hold
    if "\0" in text:
        raise SpecError(f"the {what} is not text", where=str(path))
    return text.removesuffix("\n").removesuffix("\r")


def _check_private(path: Path, what: str, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise SpecError(f"the {what} is not a plain file", where=str(path))
    if status.st_uid != os.geteuid():
        raise SpecError(f"the {what} belongs to another user", where=str(path))
    if mode & ~0o600:
        why = "can be used by others" if mode & 0o077 else "is not a private file"
        raise SpecError(f"the {what} {why} (mode {mode:04o})", where=str(path), hint=f"chmod 600 {path}")


def _has_keyring() -> bool:
    return importlib.util.find_spec("keyring") is not None


def _from_keyring(name: str) -> str | None:
    if not _has_keyring():
        return None
    keyring = importlib.import_module("keyring")
    errors = importlib.import_module("keyring.errors")
    try:
        value: str | None = keyring.get_password(KEYRING_SERVICE, name)
    except errors.NoKeyringError:
        return None  # the package is there, a keyring is not
    except errors.KeyringError as error:
        raise SpecError(f"the keyring did not give the secret {name}: {type(error).__name__}") from None
    return value
