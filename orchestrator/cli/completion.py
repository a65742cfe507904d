"""Completion of ``--set KEY=VALUE``: keys of a job file, and values where there are few."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from click.shell_completion import CompletionItem

# The models are imported where they are asked: `join_assignments` comes before each completion of a line with ``=``.


def complete(incomplete: str) -> list[CompletionItem]:
    """Return what may follow *incomplete*: whole ``key.path=`` texts, or ``key.path=value``."""
    name, equals, _ = incomplete.partition("=")
    if equals:
        found = [(f"{name}={value}", "") for value in _values(tuple(name.split(".")))]
    else:
        found = list(_keys(tuple(name.split(".")[:-1])))
    begin = len(name) + 1 if equals and os.environ.get(VALUE_ALONE) else 0
    return [CompletionItem(text[begin:], help=about) for text, about in found if text.startswith(incomplete)]


def _keys(path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the keys below *path*: ``resources.`` for a section, ``name=`` for a value."""
    from orc.launchers.spec.load import known_keys
    from orc.runtime.core.config import JOB_DOCS

    prefix = "".join(f"{part}." for part in path)
    if path[:2] == ("resources", "options"):
        yield from _backend_options(prefix, path[2:])
        return
    for key in known_keys(path):
        inner = known_keys((*path, key))
        about = JOB_DOCS[key] if path == ("runtime",) else _about((*path, key))
        yield f"{prefix}{key}{'.' if inner or _is_mapping((*path, key)) else '='}", about


def _backend_options(prefix: str, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the kinds of clusters, or the options that a job has for one of them."""
    from orc.launchers.backends import backend_class
    from orc.launchers.plugins import BACKENDS

    if not path:
        yield from ((f"{prefix}{kind}.", "") for kind in BACKENDS.kinds())
    elif len(path) == 1 and BACKENDS.has(path[0]) and (model := backend_class(path[0]).job_options_model):
        yield from ((f"{prefix}{name}=", field.description or "") for name, field in model.model_fields.items())


def _field(path: tuple[str, ...]) -> Any:
    from orc.launchers.spec.job import JobSpec
    from orc.launchers.spec.options import field_at, section_at

    section = section_at(JobSpec, path[:-1])
    return field_at(section, path[-1]) if section else None


def _about(path: tuple[str, ...]) -> str:
    field = _field(path)
    return (field.description or "") if field else ""


def _is_mapping(path: tuple[str, ...]) -> bool:
    field = _field(path)
    return field is not None and get_origin(field.annotation) is dict


def _values(path: tuple[str, ...]) -> Sequence[str]:
    from orc.launchers.plugins import COMMANDS
    from orc.runtime.core.config import KEYS

    if path == ("cluster",):
        return _clusters()
    if path in (("launcher",), ("launcher", "kind")):
        return COMMANDS.kinds()
    if path == ("environment",):
        return ["none", "copy"]
    if path[:1] == ("runtime",) and len(path) == 2 and path[1] in KEYS:
        return _few(KEYS[path[1]].parse)
    field = _field(path)
    return list(_choices(field.annotation)) if field else []


def _choices(kind: Any) -> Iterator[str]:
    if kind is bool:
        yield from ("true", "false")
    if get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
        return
    for inner in get_args(kind):
        if get_origin(kind) is not dict:
            yield from _choices(inner)


def _few(parse: Callable[[str], Any]) -> list[str]:
    """Return the usual words that *parse* takes, of those that settings of the runtime have."""
    found = []
    for word in ("true", "false", "no", "fp16", "bf16", "fp8"):
        try:
            parse(word)
        except ValueError:
            continue
        found.append(word)
    return found if len(found) < 6 else []  # a free text takes all


def _clusters() -> list[str]:
    from orc.launchers.spec.clusters import read_clusters

    return list(read_clusters()[0])


# Set while a value behind ``KEY=`` is completed: bash replaces the value alone, so the key must not be offered again.
VALUE_ALONE = "_ORC_COMPLETE_VALUE"


def join_assignments() -> None:
    """Join ``--set KEY = VALUE`` to ``--set KEY=VALUE`` in the variables that click reads; move the current word."""
    import shlex

    from click.shell_completion import split_arg_string

    words, current = split_arg_string(os.environ.get("COMP_WORDS", "")), int(os.environ.get("COMP_CWORD", "0"))
    found: list[str] = []
    position, index = current, 0
    while index < len(words):
        word, start = words[index], index
        if found and found[-1] == "--set" and words[index + 1 : index + 2] == ["="]:
            value = words[index + 2 : index + 3] if current >= index + 2 else []
            word, index = "=".join([word, *(value or [""])]), index + 1 + len(value)
        if start < current <= index:
            os.environ[VALUE_ALONE] = "1"
            position = len(found)
        elif start == current:
            position = len(found)
        found.append(word)
        index += 1
    if current >= len(words):
        position = len(found)
        if words[-1:] == ["="] and found and found[-1].endswith("="):
            os.environ[VALUE_ALONE] = "1"
            position = len(found) - 1
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = shlex.join(found), str(position)
