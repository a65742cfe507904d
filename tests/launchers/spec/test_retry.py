from __future__ import annotations

import pytest
from pydantic import ValidationError

from orc.launchers.spec import JobSpec
from orc.launchers.spec.job import LogRule


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(a+)+b", "repeats a repetition"),
        ("(x|y+)*", "repeats a repetition"),
        ("(?:[ab]{2,}c)+", "repeats a repetition"),
        ("(", "is no regular expression"),
        ("a*", "matches every line"),
        ("x" * 501, "1 to 500 characters"),
        ("", "1 to 500 characters"),
    ],
)
def test_a_pattern_that_cannot_be_searched_for_is_refused_with_the_reason(pattern, said):
    with pytest.raises(ValidationError, match=said):
        LogRule(pattern=pattern, action="fail")


@pytest.mark.parametrize("pattern", [r"CUDA error: .*ECC", r"[(+]+x", r"(?:ab{2,}){3}", r"\(a+\)+", "^ValueError: "])
def test_other_patterns_are_taken_as_they_are(pattern):
    assert LogRule(pattern=pattern, action="fail").pattern == pattern


@pytest.mark.parametrize(
    ("given", "expected"),
    [("12h", 43200), (90, 90), ("2027-01-31T18:00Z", "2027-01-31T18:00:00+00:00"), (None, None)],
)
def test_a_deadline_is_a_duration_or_a_time(given, expected):
    assert JobSpec(name="x", command="true", deadline=given).deadline == expected


@pytest.mark.parametrize("given", ["2027-13-31", "soon", 0, [1]])
def test_what_is_neither_is_refused_with_an_example(given):
    with pytest.raises(ValidationError, match="2027-01-31 18:00"):
        JobSpec(name="x", command="true", deadline=given)
