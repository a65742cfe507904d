"""Specification of a job that is like another one, with changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import SpecError
from orc.orchestrator.engine.attempt_inputs import read_stored

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec


def changed(stored: Mapping[str, Any], overrides: Sequence[str], *, where: str) -> JobSpec:
    """Return the specification *stored* (as in the ledger) after *overrides*, ``key.path=VALUE`` texts, in order.

    *where* names the job in errors. Raises `SpecError`, also for a stored one of another version of orc.
    """
    if not overrides:
        return read_stored(stored, where)
    from orc.launchers.spec import load
    from orc.launchers.spec.source import Document

    document = Document(json.loads(json.dumps(stored)), where, {}, {})
    for override in overrides:
        load.apply_override(document, override, load.reading)
    _refuse_another_snapshot(stored, document.data, where)
    return load.validate(document)


def digests_left(digests: Mapping[str, str], stored: Mapping[str, Any], new: JobSpec) -> dict[str, str]:
    """Return those of *digests* that a changed job still has: inputs that now name something else are left out."""
    from orc.launchers.snapshot.manifest import INPUT

    old = stored.get("inputs") or {}
    same = {INPUT + name for name, text in new.inputs.items() if old.get(name) == text}
    return {key: digest for key, digest in digests.items() if not key.startswith(INPUT) or key in same}


def _refuse_another_snapshot(old: Mapping[str, Any], new: Mapping[str, Any], where: str) -> None:
    """Raise `SpecError` for changes that need other files than those the job was submitted with."""
    for key in ("workdir", "environment"):
        if old.get(key) != new.get(key):
            raise SpecError(
                f"--set {key}: the new job has the snapshots of {where}, which are of that {key}",
                where=where,
                hint="submit the job file instead",
            )


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Return ``{"resources.nodes": 4}`` as override texts; a text is read as after ``--set``."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]
