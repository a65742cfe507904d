"""Escaping of control characters."""

from __future__ import annotations

import json
import unicodedata

import pytest

from orc.launchers.control_characters import escape_controls, escape_controls_in_json


def test_whatever_acts_on_a_terminal_is_shown_instead() -> None:
    every = "".join(map(chr, range(0x110000)))
    left = [c for c in escape_controls(every) if unicodedata.category(c) in ("Cc", "Cs")]
    assert left == ["\t", "\n"]
    turned = [
        c
        for c in every
        if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    ]
    assert turned
    assert not set(escape_controls("".join(turned))) & set(turned)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e4 \u65e5\u672c\tand\n", "plain \u00e4 \u65e5\u672c\tand\n"),
        ("\x1b]52;c;ZWNobw==\x07", r"\x1b]52;c;ZWNobw==\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb\x7f", r"a\x0db\x7f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\udc80", r"\udc80"),
    ],
)
def test_the_escape_says_which_character_it_was(text: str, shown: str) -> None:
    assert escape_controls(text) == shown
    assert escape_controls(text, keep="\r").count("\r") == text.count("\r")


def test_json_stays_the_same_document() -> None:
    value = {"reason": "\x1b]0;t\x07 \x7f\x9b \u202e \udc80 \u00e4"}
    document = escape_controls_in_json(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(document) == value
    assert document == escape_controls(document)
