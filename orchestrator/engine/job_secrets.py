"""The values of a job's secrets, from its submission until it has ended.

A retry may be submitted by a process that does not have the user's environment (the agent's ``orc tick``, cron), so
the values are kept in ``<state dir>/job-secrets/<job>.json``, mode 0600, and removed when the job is terminal. They
are in no other place of the orchestrator: not in a plan, an event or an error message, and in the ledger only as
ciphertext, where a service has taken them.

Encryption is authenticated (Fernet), with keys that are not in the ledger: those of ``$ORC_SECRETS_KEY`` (separated by
commas), else the lines of ``secrets.key`` in the state directory, mode 0600, which the first use makes. The first key
encrypts, all of them decrypt: a new one is put in front, and an old one removed when the jobs that were encrypted with
it have ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.launchers.remote.files import write_file
from orc.launchers.secrets import read_private, redact, resolve_secrets
from orc.launchers.snapshot.tree_store import fsync_directory
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

# A file without a job is left by a submission that died before the job was durable; a living one needs milliseconds.
_ORPHAN_AGE_S = 600.0
_OUTPUT = ("log_tail", "stall", "reason")
_NOT_THERE = (FileNotFoundError, NotADirectoryError)


def keep(state_dir: Path, job_id: str, values: Mapping[str, str]) -> None:
    """Store *values* for the job's later attempts; nothing is written when there are none. Raises `LaunchError`."""
    if not values:
        return
    directory = state_dir / "job-secrets"
    try:
        write_file(str(_file(state_dir, job_id)), json.dumps(dict(values)).encode(), 0o600)
        fsync_directory(directory)
    except OSError as error:
        raise LaunchError(
            f"cannot keep the job's secrets: {error.strerror or error}",
            where=str(directory),
            hint="free some space or point ORC_STATE_DIR to another directory",
        ) from None


def load_for(ws: Workspace, job_id: str, names: Sequence[str]) -> dict[str, str]:
    """Return the values that were encrypted for the job; those of a job with a file, or none, as `load` does.

    Raises `SpecError` for a value that is nowhere, `DecryptionError`.
    """
    if names and (values := _decrypted(ws, job_id)):
        return {name: values[name] for name in names if name in values}
    return load(ws.state_dir, job_id, names)


def _decrypted(ws: Workspace, job_id: str) -> dict[str, str]:
    with ws.ledger.database.read() as connection:
        rows = connection.tuples("SELECT sealed FROM sealed_secrets WHERE job_id = :job", {"job": job_id})
    return decrypt(ws.state_dir, job_id, rows[0][0]) if rows else {}


def load(state_dir: Path, job_id: str, names: Sequence[str]) -> dict[str, str]:
    """Return the values that `keep` stored, others as at submission. Raises `SpecError` for a value that is nowhere."""
    if not names:
        return {}
    return resolve_secrets(names, {**os.environ, **_stored(state_dir, job_id)})


def without_values(ws: Workspace, job_id: str, value: Any) -> Any:
    """*value* (JSON-able) with every occurrence of the job's secrets replaced: what a rank prints may hold one."""
    try:
        stored = _stored(ws.state_dir, job_id) or _decrypted(ws, job_id)
    except DecryptionError:
        return _without_output(value)
    return _redacted(value, list(stored.values())) if stored else value


def _without_output(value: Any) -> Any:
    """Return *value* without the output of ranks: it may show a secret that looks like other text."""
    if isinstance(value, Mapping):
        return {key: "" if key in _OUTPUT else _without_output(item) for key, item in value.items()}
    return [_without_output(item) for item in value] if isinstance(value, (list, tuple)) else value


def _redacted(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, Mapping):
        return {key: _redacted(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, secrets) for item in value]
    return value


def _stored(state_dir: Path, job_id: str) -> dict[str, str]:
    try:
        stored: dict[str, str] = json.loads(_file(state_dir, job_id).read_bytes())
    except _NOT_THERE:
        return {}
    return stored


def remove(state_dir: Path, job_id: str) -> None:
    """Forget the job's secrets."""
    with suppress(*_NOT_THERE):
        _file(state_dir, job_id).unlink()


@contextmanager
def until_recorded(ws: Workspace, *job_ids: str) -> Iterator[None]:
    """Remove the secrets of new jobs where the block that records them fails, and they certainly are not there.

    A ledger whose connection broke may have taken the jobs all the same: then they need their secrets, and nobody waits
    for this process's claims. What belongs to no job is swept away later.
    """
    try:
        yield
    except LedgerError:
        with suppress(LedgerError):
            ws.give_back(*job_ids)
        raise
    except BaseException:
        for job_id in job_ids:
            remove(ws.state_dir, job_id)
        raise


def sweep(state_dir: Path, is_active: Callable[[str], bool | None]) -> None:
    """Remove what a crash left behind: secrets of jobs that have ended (False) or never came to be (None)."""
    directory = state_dir / "job-secrets"
    try:
        names = os.listdir(directory)
    except _NOT_THERE:
        return
    for name in names:
        path = directory / name
        active = None if name.startswith(".") else is_active(name.removesuffix(".json"))
        try:
            if active is False or (active is None and time.time() - path.stat().st_mtime > _ORPHAN_AGE_S):
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # its writer renamed it, or another pass removed it


def _file(state_dir: Path, job_id: str) -> Path:
    return state_dir / "job-secrets" / f"{job_id}.json"


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
