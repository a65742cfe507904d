"""Readers of option values, and models made of them: what is taken, what is refused, and in which words."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest

from orc.launchers.spec.options import (
    Flag,
    FrozenModel,
    Number,
    Reader,
    Whole,
    Word,
    argument,
    keys_of,
    matching,
    one_of,
    path,
    seconds,
    section_at,
    several,
    text,
    validate_options,
    whole,
    word,
)
from orc.launchers.spec.problems import SpecProblems
from orc.launchers.spec.source import Document, Origin, Placed


@pytest.mark.parametrize(
    ("reader", "given", "value"),
    [
        (text, " two words ", "two words"),
        (text, 1.5, "1.5"),
        (word, True, "true"),
        (argument, "a b", "a b"),
        (path, "/a/", "/a"),
        (path, "/", "/"),
        (path, "~", "~"),
        (matching("[a-z]+", "a name"), "abc", "abc"),
        (one_of("a", 2), 2, 2),
        (whole(1, 9), "7", 7),
        (seconds(1, 3600), "2m", 120),
        (several, "a", ["a"]),
        (several, {"a": 1}, [{"a": 1}]),
        (several, ("a", "b"), ("a", "b")),
    ],
)
def test_a_value_is_read(reader: Reader, given: Any, value: Any) -> None:
    assert reader(given) == value


@pytest.mark.parametrize(
    ("reader", "given", "says"),
    [
        (text, "  ", "must not be empty"),
        (text, "a\nb", "must be one line of printable characters"),
        (text, None, "has no value"),
        (word, "a b", "'a b' must not contain blanks"),
        (argument, "-x", "'-x' must not begin with a dash"),
        (path, "a/b", "'a/b' is not an absolute path"),
        (path, "~user/x", "is not an absolute path"),
        (matching("[a-z]+", "a name", "abc"), "A1", "'A1' is not a name; write for example abc"),
        (one_of("a", "b", 2), True, "expected a, b or 2, not True"),
        (whole(1, 9), 10, "expected a whole number from 1 to 9, not 10"),
        (whole(1, 9), True, "expected a whole number from 1 to 9, not True"),
        (whole(1, 9), 1.0, "expected a whole number"),
        (seconds(60, 2592000), "1s", "expected 60 to 2592000 seconds, not '1s'"),
        (seconds(0.1, 600), 0, "expected 0.1 to 600 seconds, not 0"),
    ],
)
def test_another_value_is_refused_with_the_reason(reader: Reader, given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        reader(given)


class Disk(FrozenModel):
    short_form = "name"

    name: Word
    size: Whole = 1


class Options(FrozenModel):
    disks: Annotated[tuple[Disk, ...], several] = ()
    wait: Annotated[Number, seconds(1, 60)] = 5
    on: Flag = False


def test_a_bare_text_stands_for_the_model_that_has_a_short_form() -> None:
    assert Options.model_validate({"disks": "a"}).disks == (Disk(name="a"),)
    assert Options.model_validate({"disks": ["a", {"name": "b", "size": 2}]}).disks[1].size == 2


def test_sections_are_found_by_their_path_in_lists_too() -> None:
    assert section_at(Options, ("disks", 0)) is Disk
    assert section_at(Options, ("wait",)) is section_at(Options, ("nope",)) is None
    assert keys_of(Options) == ["disks", "wait", "on"]


def test_null_means_not_given() -> None:
    assert validate_options(Options, {"wait": None}, "here") == Options()


def test_every_mistake_is_named_with_its_place_and_the_nearest_key() -> None:
    places = {("wait",): Origin("f:1:1", (1, 1)), ("disks", 0): Origin("f:2:1", (2, 1))}
    data: dict[str, Any] = {"wait": 90, "disks": [{"name": "a", "siez": 2}]}
    given = Placed(data, Document(data, "f", {}, {(): Origin("f"), **places}), ())
    with pytest.raises(SpecProblems) as caught:
        validate_options(Options, given, "elsewhere")
    assert str(caught.value).splitlines() == [
        "f:1:1: wait: expected 1 to 60 seconds, not 90",
        "f:2:1: disks[0]: unknown key 'siez', did you mean 'size'?",
    ]


def test_options_from_no_file_are_named_by_their_place_in_words() -> None:
    with pytest.raises(SpecProblems, match="unknown key 'wiat', did you mean 'wait'") as caught:
        validate_options(Options, {"wiat": 2}, "cluster x: options")
    assert caught.value.where == "cluster x: options"
