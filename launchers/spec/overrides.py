"""Overrides of a job file's data before it is checked: ``--set resources.nodes=4``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orc.launchers.errors import SpecError
from orc.launchers.spec.problems import dotted
from orc.launchers.spec.source import Document, KeyPath, Origin, Reading, parse_value


def apply(document: Document, override: str, reading: Callable[[KeyPath], Reading]) -> None:
    """Change *document* by one ``key.path=VALUE``; the value is YAML. Raises `SpecError`."""
    name, equals, text = override.partition("=")
    where = f"--set {override if len(override) <= 80 else override[:77] + '...'}"
    path: KeyPath = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise SpecError("expected key.path=VALUE", where=where, hint="for example --set resources.nodes=4")
    try:
        override.encode()
    except UnicodeEncodeError:
        raise SpecError("the override is not valid UTF-8", where=repr(where)) from None
    try:
        value = parse_value(text, where, path, reading)
    except SpecError as error:
        # A line and a column in so short a text say nothing.
        raise SpecError(error.what, where=where, hint=error.hint) from None
    # A variable may well be empty; elsewhere no value means the default.
    empty = "" if len(path) == 2 and path[0] == "env" and not text.strip() else None
    put(document, path, value.data[""] if empty is None else empty, where, value)


def put(document: Document, path: KeyPath, value: Any, where: str, origins: Document | None = None) -> None:
    """Set *value* at *path*, making the mappings on the way; its origin becomes *where*."""
    origin = Origin(where, (1 << 30, 0))
    target: Any = document.data
    for depth, part in enumerate(path[:-1], start=1):
        inner = target.get(part)
        if inner is None:
            document.keys[path[:depth]] = document.values[path[:depth]] = origin
            inner = target[part] = {}
        elif isinstance(inner, str) and path[:depth] in (("launcher",), ("workdir",)):
            # The short form of these sections is a text; make it the long form.
            inner = target[part] = {"kind" if part == "launcher" else "path": inner}
        elif not isinstance(inner, dict):
            raise SpecError(f"{dotted(path[:depth])} is not a mapping, so {dotted(path)} cannot be set", where=where)
        target = inner
    for table in (document.keys, document.values):
        for known in [known for known in table if known[: len(path)] == path]:
            del table[known]
    document.keys[path] = document.values[path] = origin
    if origins is not None:
        document.keys.update(origins.keys)
        document.values.update(origins.values)
    if value is None:
        target.pop(path[-1], None)
    else:
        target[path[-1]] = value
