"""Names of jobs and attempts. Every identifier is safe in a path, a shell word and a Slurm job name."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from orc.launchers.errors import SpecError

_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # no 0/o, 1/l/i: ids are read aloud and typed
# No job may get the id that another one has had, here or in another ledger with the same cluster: it would be taken for
# that one. With so many characters a million jobs of one name meet with a chance of less than one in a thousand.
_RANDOM = 10
_SLUG = re.compile(r"[^a-z0-9]+")
JOB_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,60}[a-z0-9])?")
_MARKER = re.compile(r"orc-(?P<job>.+)-a(?P<number>[1-9][0-9]*)")


def slug(name: str) -> str:
    """Lower-case letters, digits and single dashes, 36 characters at most; ``job`` when nothing is left."""
    return _SLUG.sub("-", name.lower()).strip("-")[:36].rstrip("-") or "job"


def new_job_id(name: str) -> str:
    """A fresh job id: the slug of the name and ten random characters, like ``digits-k3f9a2m4xq``."""
    return f"{slug(name)}-{''.join(secrets.choice(_ALPHABET) for _ in range(_RANDOM))}"


def derived_job_id(name: str, seed: str) -> str:
    """The job id that follows from *seed*: the same one for the same seed, like a fresh one otherwise."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
    letters = []
    for _ in range(_RANDOM):
        number, index = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[index])
    return f"{slug(name)}-{''.join(letters)}"


def placeholder_job_id(name: str) -> str:
    """The id that ``orc render`` shows for a job that was not submitted; deterministic."""
    return f"{slug(name)}-000000"


@dataclass(frozen=True, order=True)
class AttemptId:
    """Attempt at running a job. Backends recognise it by its marker, for ever."""

    job: str
    number: int  # from 1

    def __post_init__(self) -> None:
        if not JOB_ID.fullmatch(self.job):
            raise SpecError(f"not a job id: {self.job!r}", hint="job ids look like digits-k3f9a2m4xq")
        if self.number < 1:
            raise SpecError(f"attempts count from 1, not {self.number}")

    @property
    def marker(self) -> str:
        """``orc-<job>-a<n>``: durable before any side effect, carried by everything the backend keeps."""
        return f"orc-{self.job}-a{self.number}"

    @classmethod
    def from_marker(cls, marker: str) -> AttemptId:
        """The inverse of `marker`. Raises `SpecError` for anything else."""
        match = _MARKER.fullmatch(marker)
        if not match:
            raise SpecError(f"not an attempt marker: {marker!r}", hint="markers look like orc-digits-k3f9a2m4xq-a1")
        return cls(match["job"], int(match["number"]))

    def __str__(self) -> str:
        return f"{self.job}/a{self.number}"
