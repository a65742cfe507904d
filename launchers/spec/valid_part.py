"""The part of a wrong job file that is right, so that its mistakes of all kinds can be shown at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.job import JobSpec
from orc.launchers.spec.source import KeyPath

_ROUNDS = 3  # what is wrong only without other mistakes comes up in the next one
_PROGRAMS = ("script", "module", "command")


def valid_part(data: dict[str, Any], error: ValidationError) -> JobSpec | None:
    """Return the job that *data* describes without what *error* is about; `None` where nothing can be made of it."""
    rest = copy.deepcopy(data)
    for _ in range(_ROUNDS):
        for path in _paths(error):
            _remove(rest, path)
        rest.setdefault("name", "unnamed")
        if all(rest.get(program) is None for program in _PROGRAMS):
            rest["command"] = "true"
        try:
            return JobSpec.model_validate(rest)
        except ValidationError as again:
            error = again
    return None


def _paths(error: ValidationError) -> Iterator[KeyPath]:
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        inner = [path for path, _ in cause.problems] if isinstance(cause, LocatedError) else [()]
        for path in inner:
            yield (*item["loc"], *path)


def _remove(data: Any, path: KeyPath) -> None:
    """Remove the value at *path*; of a list, and of what holds no such key, the whole."""
    owner, key = data, path[0] if path else None
    while key in owner and isinstance(owner[key], dict) and len(path) > 1 and path[1] in owner[key]:
        owner, path = owner[key], path[1:]
        key = path[0]
    owner.pop(key, None)
