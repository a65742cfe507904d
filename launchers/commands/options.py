"""Options of a launcher: one table per command, and the same words of refusal for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

_SCALARS = (str, int, float)


@dataclass(frozen=True)
class Option:
    """Type of one option. *choices* are for texts, *minimum* is for numbers."""

    expected: str  # in words
    types: tuple[type, ...]  # exactly these: a bool is an int elsewhere
    choices: tuple[str, ...] = ()
    minimum: float | None = None

    def problem(self, value: Any) -> str | None:
        """Return the problem of *value*, or `None`."""
        if type(value) not in self.types:
            return f"expected {self.expected}"
        if self.choices and value not in self.choices:
            return f"expected one of {', '.join(self.choices)}{_did_you_mean(value, self.choices)}"
        if self.minimum is not None and value < self.minimum:
            return f"expected at least {self.minimum:g}"
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        if any(not isinstance(item, _SCALARS) for item in inner):
            return f"expected {self.expected} with plain values"
        if isinstance(value, str) and (not value.strip() or "\n" in value or "\0" in value):
            return "expected one line of text"
        return None


TEXT = Option("text", (str,))
NUMBER = Option("a number", (int, float), minimum=0)
FLAG = Option("true or false", (bool,))
MAPPING = Option("a mapping", (dict,))
WORDS = Option("a list of words", (list, tuple))


def whole(minimum: int) -> Option:
    """A whole number from *minimum* on."""
    return Option("a whole number", (int,), minimum=minimum)


def one_of(*choices: str) -> Option:
    """Return the type of an option that is one of some texts."""
    return replace(TEXT, choices=choices)


class Refusal(str):
    """Reason why a job cannot be run, which is about one *option* of its launcher."""

    option: str

    def __new__(cls, option: str, reason: str) -> Self:
        """Return *reason*, with the name of the option."""
        refusal = super().__new__(cls, reason)
        refusal.option = option
        return refusal


def about(option: str, problem: str) -> Refusal:
    """Return the refusal ``option NAME PROBLEM``."""
    return Refusal(option, f"option {option} {problem}")


def refuse(given: Mapping[str, Any], known: Mapping[str, Option], decided: Mapping[str, str]) -> Refusal | None:
    """Return the reason why the options *given* cannot be taken, or `None`.

    *known* are the options that exist; *decided* are those that orc decides itself, with the reason or the better way.
    """
    for name, value in given.items():
        if name in decided:
            return about(name, f"cannot be given: {decided[name]}")
        option = known.get(name)
        if option is None:
            near = _did_you_mean(name, known)
            return Refusal(name, f"unknown option {name!r}{near or '; known: ' + ', '.join(known)}")
        if problem := option.problem(value):
            return about(name, f"= {value!r}: {problem}")
    return None


def flags(given: Mapping[str, Any], *, separator: str = "-") -> Iterator[str]:
    """Options as ``--name=value``; a flag that is true alone, one that is false not at all; mappings as ``a=b,c=d``."""
    for name, value in given.items():
        flag = "--" + name.replace("_", separator)
        if isinstance(value, bool):
            if value:
                yield flag
        elif isinstance(value, Mapping):
            yield f"{flag}={pairs(value)}"
        else:
            yield f"{flag}={value}"


def pairs(mapping: Mapping[str, Any]) -> str:
    """``a=b,c=d``."""
    return ",".join(f"{key}={item}" for key, item in mapping.items())


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    from orc.launchers.spec.problems import nearest

    return nearest(name, known)
