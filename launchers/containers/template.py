"""A user's part of what a backend sends: merged into it, and refused where it contradicts it. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from orc.launchers.errors import RenderError


def merged(base: dict[str, Any], patch: Mapping[str, Any], keys: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return *base* with *patch*, an option called ``pod_template``, as a strategic merge.

    Items of the lists *keys* are merged by the key that is named there, other lists go on. Raises `RenderError` where
    that changes what *base* says.
    """
    made: dict[str, Any] = _merge(base, patch, "", keys)
    if changed := _changed(base, made, ""):
        raise RenderError(f"pod_template: {changed} is orc's own", where=where, hint="The options have a key for it.")
    return made


def _merge(base: Any, patch: Any, name: str, keys: Mapping[str, str]) -> Any:
    if isinstance(base, dict) and isinstance(patch, Mapping):
        made = {**base, **{key: _merge(base.get(key), value, key, keys) for key, value in patch.items()}}
        return {key: value for key, value in made.items() if value is not None}
    if not isinstance(base, list) or not isinstance(patch, list):
        return copy.deepcopy(patch)
    if (key := keys.get(name)) is None:
        return [*base, *patch]
    items = {item.get(key): item for item in base}
    items.update({item.get(key): _merge(items.get(item.get(key)), item, "", keys) for item in patch})
    return list(items.values())


def _changed(base: Any, made: Any, path: str) -> str:
    """Return the path of the first value of *base* that is another one in *made*; empty when there is none."""
    if isinstance(base, dict) and isinstance(made, dict):
        found = (_changed(value, made.get(key), f"{path}.{key}") for key, value in base.items())
    elif isinstance(base, list) and isinstance(made, list) and len(made) >= len(base):
        found = (_changed(*pair, f"{path}[{number}]") for number, pair in enumerate(zip(base, made, strict=False)))
    else:
        return "" if base == made else path.removeprefix(".")
    return next(filter(None, found), "")
