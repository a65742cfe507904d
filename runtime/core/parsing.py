"""Values from texts: truth values, numbers and names from a fixed list. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

_TRUE = frozenset({"1", "true", "yes", "y", "on", "t"})
_FALSE = frozenset({"0", "false", "no", "n", "off", "f", ""})


def parse_bool(text: str) -> bool:
    """``1 true yes y on t`` and ``0 false no n off f`` (any case). Raises `ValueError` for anything else."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"not a truth value: {text!r}")


def switched_on(env: Mapping[str, str], variable: str) -> bool:
    """Return the truth value of *variable*, false where it is not set. Raises `ValueError`, which names it."""
    try:
        return parse_bool(env.get(variable, ""))
    except ValueError as error:
        raise ValueError(f"{variable}={env[variable]!r}: {error}") from None


def read_variables(env: Mapping[str, str], wanted: Iterable[tuple[str, str, Callable[[Any], Any]]]) -> dict[str, Any]:
    """Return the parsed values of those variables of *env* that are set, by name.

    *wanted* are triples of a name, its variable and its parser. Raises `ValueError`, which names the variable.
    """
    values: dict[str, Any] = {}
    for name, variable, parse in wanted:
        text = env.get(variable, "")
        if text.strip():
            try:
                values[name] = parse(text)
            except ValueError as error:
                raise ValueError(f"{variable}={text!r}: {error}") from None
    return values


def read_mapping(
    values: Any, parsers: Mapping[str, tuple[str, Callable[[Any], Any]]], example: str, prefix: str = ""
) -> dict[str, Any]:
    """Return the parsed *values* of a mapping with documented keys, with or without *prefix*. ``None`` means unset.

    *parsers* are the key and the parser for each spelling.

    Raises:
        ValueError: it is no mapping (the text has the *example*), an unknown key (with the nearest), or a bad value.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a mapping like {example}")
    normal: dict[str, Any] = {}
    for given, value in values.items():
        spelling = str(given).removeprefix(prefix)
        if spelling not in parsers:
            raise ValueError(f"unknown key {given!r}{nearest(spelling, parsers)}")
        key, parse = parsers[spelling]
        if value is None:
            continue
        if key in normal:
            raise ValueError(f"{key} is given twice")
        try:
            normal[key] = parse(value)
        except ValueError as error:
            raise ValueError(f"{given}: {value!r}: {error}") from None
    return normal


def variable_text(value: Any) -> str:
    """Return how a variable of the environment carries a parsed *value*."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(variable_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def truth(value: Any) -> bool:
    """Return the truth value that *value* is or spells; see `parse_bool`. Raises `ValueError`."""
    if isinstance(value, (bool, str)):
        return value if isinstance(value, bool) else parse_bool(value)
    if value in (0, 1):
        return bool(value)
    raise ValueError("expected true or false")


def whole(minimum: int, maximum: int | None = None) -> Callable[[Any], int]:
    """Return the parser of whole numbers of at least *minimum*, and at most *maximum* if there is one."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value: Any) -> int:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            with suppress(ValueError):
                if minimum <= (number := int(value)) and (maximum is None or number <= maximum):
                    return number
        raise ValueError(f"expected a whole number {bounds}")

    return parse


def number(minimum: float, endless: bool = False) -> Callable[[Any], float]:
    """Return the parser of numbers of at least *minimum*; infinity is one if *endless*."""

    def parse(value: Any) -> float:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            with suppress(ValueError):
                if minimum <= (found := float(value)) and (endless or found < float("inf")):
                    return found
        raise ValueError(f"expected a number of at least {minimum}")

    return parse


def choice(*allowed: str) -> Callable[[Any], str]:
    """Return the parser of one of *allowed*, in any case. YAML's bare ``no`` is false, and means ``no`` here."""

    def parse(value: Any) -> str:
        word = "no" if value is False else str(value).strip()
        for name in allowed:
            if name.lower() == word.lower():
                return name
        raise ValueError(f"expected one of {', '.join(allowed)}{nearest(word, allowed)}")

    return parse


def one_of(*names: str) -> Callable[[Any], str]:
    """Return the parser of one of *names*: by name in any case, by number from 1, or as an enum member of that name.

    It raises `ValueError` with all names and the nearest.
    """

    def parse(value: Any) -> str:
        text = str(getattr(value, "name", value)).strip().upper().lstrip("_")
        if text in names:
            return text
        if text.isdecimal() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
        raise ValueError(f"expected one of {listed}{nearest(text, names)}")

    return parse


def nearest(word: str, known: Any) -> str:
    """Return ``, did you mean 'X'?`` for the name in *known* that is most like *word*; nothing if none is."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
