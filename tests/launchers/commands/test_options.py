"""Options of launchers are checked by name and type, with the nearest name and the better way in the refusal."""

from __future__ import annotations

from typing import Any

import pytest

from orc.launchers.commands.options import FLAG, MAPPING, NUMBER, TEXT, WORDS, flags, one_of, refuse, whole

KNOWN = {
    "interval": NUMBER,
    "count": whole(1),
    "name": TEXT,
    "loud": FLAG,
    "conf": MAPPING,
    "words": WORDS,
    "way": one_of("static", "dynamic"),
}
DECIDED = {"nnodes": "it follows from resources.nodes"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"interval": 0, "count": 1, "name": "x y", "loud": False, "conf": {"a": 1}, "words": ["a", 1], "way": "static"},
        {"interval": 0.5},
    ],
)
def test_what_fits_is_taken(given: dict[str, Any]) -> None:
    assert refuse(given, KNOWN, DECIDED) is None


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("intervall", 1, "unknown option 'intervall', did you mean 'interval'?"),
        ("xyzzy", 1, "unknown option 'xyzzy'; known: interval, count, name, loud, conf, words, way"),
        ("nnodes", 3, "option nnodes cannot be given: it follows from resources.nodes"),
        ("interval", "fast", "option interval = 'fast': expected a number"),
        ("interval", True, "option interval = True: expected a number"),
        ("interval", -1, "option interval = -1: expected at least 0"),
        ("count", 0, "option count = 0: expected at least 1"),
        ("count", 1.5, "option count = 1.5: expected a whole number"),
        ("name", 1, "option name = 1: expected text"),
        ("name", " ", "option name = ' ': expected one line of text"),
        ("name", "a\nb", "option name = 'a\\nb': expected one line of text"),
        ("loud", "yes", "option loud = 'yes': expected true or false"),
        ("loud", 1, "option loud = 1: expected true or false"),
        ("conf", "a=b", "option conf = 'a=b': expected a mapping"),
        ("conf", {"a": [1]}, "option conf = {'a': [1]}: expected a mapping with plain values"),
        ("words", "a b", "option words = 'a b': expected a list of words"),
        ("words", [None], "option words = [None]: expected a list of words with plain values"),
        ("way", "statik", "option way = 'statik': expected one of static, dynamic, did you mean 'static'?"),
        ("way", None, "option way = None: expected text"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(name: str, value: object, reason: str) -> None:
    assert refuse({name: value}, KNOWN, DECIDED) == reason


def test_options_become_flags() -> None:
    given = {"max_it": 0.5, "on": True, "off": False, "conf": {"timeout": 60, "a": "b"}}
    assert list(flags(given)) == ["--max-it=0.5", "--on", "--conf=timeout=60,a=b"]
    assert list(flags({"max_it": 1}, separator="_")) == ["--max_it=1"]
