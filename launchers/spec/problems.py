"""Report of validation errors: ``job.yaml:3:5: resources: unknown key 'nodez', did you mean 'nodes'?``"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import SpecError
from orc.launchers.spec.grammar import LocatedError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from orc.launchers.spec.source import Document, KeyPath


@dataclass(frozen=True)
class Problem:
    """Fault of a file: its place, the key, the message and the remedy."""

    where: str
    key: str
    what: str
    hint: str = ""
    order: tuple[int, int] = (0, 0)

    @property
    def text(self) -> str:
        """``key: what``, without the place."""
        return f"{self.key}: {self.what}" if self.key else self.what


class SpecProblems(SpecError):
    """All faults of a file, in the order of its lines; ``problems`` has them one by one."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: p.order))
        first = self.problems[0]
        if len(self.problems) == 1:
            super().__init__(first.text, where=first.where, hint=first.hint)
        else:
            lines = [f"{p.where}: {p.text}" + (f" ({p.hint})" if p.hint else "") for p in self.problems]
            super().__init__("\n".join(lines))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``, did you mean 'nodes'?``, or nothing when no known name is near."""
    near = closest(name, known)
    return f", did you mean {near!r}?" if near else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is near to *name*, or nothing."""
    import difflib

    names = list(known)
    # difflib thinks nothing of two letters in the wrong order: for it, "agrs" is as near to "tags" as to "args".
    near = sorted(difflib.get_close_matches(name, names, n=5), key=lambda key: _slips(name, key))
    return next(iter(near or [k for k in names if k.startswith(f"{name}_")]), "")


def _slips(typed: str, meant: str) -> int:
    """Return the number of letters added, left out, mistaken, or swapped with their neighbour."""
    rows = [list(range(len(meant) + 1))]
    for i, letter in enumerate(typed, 1):
        row = [i]
        for j, right in enumerate(meant, 1):
            fewest = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != right))
            if i > 1 and j > 1 and (letter, typed[i - 2]) == (meant[j - 2], right):
                fewest = min(fewest, rows[-2][j - 2] + 1)
            row.append(fewest)
        rows.append(row)
    return rows[-1][-1]


def choose(name: str, known: Sequence[str]) -> str:
    """Return the suggestion of `nearest`, or the list of all known names when none is near."""
    return nearest(name, known) or f"; known are {', '.join(known)}"


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as text: ``retry.on[0]`` for ``("retry", "on", 0)``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


Suggest = Callable[["KeyPath", str], str]


def translate(error: ValidationError, document: Document, suggest: Suggest) -> list[Problem]:
    """Return the problems behind *error*. ``suggest(path, name)`` is the remark on an unknown key."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        problems += _one(item, document, suggest)
    return problems


def at(document: Document, path: KeyPath, what: str, *, key: bool = False, shown: KeyPath | None = None) -> Problem:
    """Return the problem *what* at *path* of *document*; the report names *shown*, or *path* unless given."""
    origin = document.origin(path, key=key)
    return Problem(origin.where, dotted(path if shown is None else shown), what, order=origin.order)


def _one(item: Any, document: Document, suggest: Suggest) -> list[Problem]:
    kind: str = item["type"]
    path: KeyPath = item["loc"]
    # The engine marks what it has against a key of a mapping by one more part.
    on_key = path[-1:] == ("[key]",) and path not in document.values
    if on_key:
        path = path[:-1]
    if kind == "extra_forbidden":
        name, parent = str(path[-1]), path[:-1]
        return [at(document, path, f"unknown key {name!r}{suggest(parent, name)}", key=True, shown=parent)]
    if kind == "missing":
        return [at(document, path[:-1], f"the key {path[-1]!r} is required")]
    if kind == "value_error":
        cause = item["ctx"]["error"]
        if isinstance(cause, LocatedError):
            return [at(document, (*path, *inner), what) for inner, what in cause.problems]
        return [at(document, path, str(cause), key=on_key)]
    return [at(document, path, _message(item), key=on_key)]


_EXPECTED = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "string_type": "expected text",
    "bool_type": "expected true or false",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping of keys and values",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
}


def _message(item: Any) -> str:
    kind, given = item["type"], item["input"]
    context = item.get("ctx", {})
    instead = f", not {shown(given)}"
    if kind in _EXPECTED:
        return _EXPECTED[kind] + instead
    if kind == "greater_than_equal":
        return f"must be at least {context['ge']}{instead}"
    if kind == "less_than_equal":
        return f"must be at most {context['le']}{instead}"
    if kind == "literal_error":
        hint = (
            nearest(given, context["expected"].replace("'", "").replace(" or ", ", ").split(", "))
            if isinstance(given, str)
            else ""
        )
        return f"expected {context['expected']}{instead}{hint}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    message: str = item["msg"]
    return message[:1].lower() + message[1:] + instead


def shown(value: Any) -> str:
    """Return a value of a file as messages name it, short."""
    if value is None:
        return "empty (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
