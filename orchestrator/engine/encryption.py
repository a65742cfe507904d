"""Encryption of secrets at rest: authenticated encryption (Fernet) with keys that are not in the ledger.

Keys are those of ``$ORC_SECRETS_KEY`` (separated by commas), else the lines of ``secrets.key`` in the state directory,
mode 0600, which the first use makes. The first key encrypts, all of them decrypt: a new one is put in front, and an old
one removed when the jobs that were encrypted with it have ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError
from orc.launchers.remote.files import write_file
from orc.launchers.secrets import read_private

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet


VARIABLE = "ORC_SECRETS_KEY"
FILE = "secrets.key"


class DecryptionError(LaunchError):
    """The key that secrets were encrypted with is not here."""


def encrypt(state_dir: Path, job_id: str, values: Mapping[str, str]) -> str:
    """Return *values* as ciphertext, which opens for *job_id* alone. Raises `LaunchError` without a usable key."""
    text = json.dumps({"job": job_id, "values": dict(values)})
    return _cipher(state_dir, create=True).encrypt(text.encode()).decode()


def decrypt(state_dir: Path, job_id: str, ciphertext: str) -> dict[str, str]:
    """Return the values that `encrypt` was given. Raises `DecryptionError`, which repeats nothing of it."""
    from cryptography.fernet import InvalidToken

    try:
        opened = json.loads(_cipher(state_dir, create=False).decrypt(ciphertext.encode()))
    except InvalidToken:
        opened = None
    if not isinstance(opened, dict) or opened.get("job") != job_id:
        raise DecryptionError(
            "the job's secrets were encrypted with another key",
            where=job_id,
            hint=f"${VARIABLE} or {state_dir / FILE} has to hold the key of the service, old ones after new ones",
        )
    values: dict[str, str] = opened["values"]
    return values


def _cipher(state_dir: Path, *, create: bool) -> MultiFernet:
    try:
        from cryptography.fernet import Fernet, MultiFernet
    except ModuleNotFoundError:
        raise LaunchError(
            "secrets of a service's jobs need the package cryptography", hint="pip install 'orc-launch[service]'"
        ) from None
    given = os.environ.get(VARIABLE)
    path = state_dir / FILE
    text = given.replace(",", "\n") if given else read_private(path, "key of the secrets")
    if text is None:
        text = _make(path, Fernet.generate_key().decode()) if create else ""
    try:
        keys = [Fernet(line.strip()) for line in text.splitlines() if line.strip()]
    except ValueError:
        keys = []
    if not keys:
        raise DecryptionError(
            "there is no usable key for secrets",
            where=VARIABLE if given else str(path),
            hint="a key is 32 bytes as URL-safe base64; the service makes one in its state directory",
        )
    return MultiFernet(keys)


def _make(path: Path, key: str) -> str:
    """Write a new key and return it, or the one that another process has written meanwhile. Raises `LaunchError`."""
    try:
        with suppress(FileExistsError):
            write_file(str(path), f"{key}\n".encode(), 0o600, new=True)
    except OSError as error:
        raise LaunchError(f"cannot keep the key of the secrets: {error.strerror}", where=str(path)) from None
    return read_private(path, "key of the secrets") or ""
