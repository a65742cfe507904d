"""The small languages of job files."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orc.launchers.spec import grammar


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (1.5, 1.5),
        ("90", 90),
        ("90s", 90),
        ("90m", 5400),
        ("2h", 7200),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("1d", 86400),
        ("1d2h3m4s", 93784),
        ("1:30:00", 5400),
        ("0:00:01", 1),
        ("100:00:00", 360000),
        ("2-12:00:00", 216000),
        (" 5m ", 300),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert grammar.seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "m", "1m1h", "1:2", "1:60:00", "1:00:60", "-1", "-5m", "1e3", "5 minutes", "1h 30m", "inf", "nan", "١h"],
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        grammar.seconds(text)


@pytest.mark.parametrize(
    "value", ["9" * 400, "9" * 16 + "s", "99999d", True, None, [], {}, float("nan"), float("inf"), -0.5, 10**400]
)
def test_what_is_no_duration_between_nothing_and_ten_years(value: object) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        grammar.seconds(value)


@given(st.integers(1, 300 * 86400))
def test_a_time_limit_keeps_its_seconds(seconds: int) -> None:
    text = grammar.time_limit(seconds)
    assert re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", text)
    assert grammar.seconds(text) == seconds
    assert grammar.time_limit(text) == text


@given(days=st.integers(0, 99), hours=st.integers(0, 99), minutes=st.integers(0, 99), seconds=st.integers(0, 99))
def test_units_add_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    text = f"{days}d{hours}h{minutes}m{seconds}s"
    assert grammar.seconds(text) == days * 86400 + hours * 3600 + minutes * 60 + seconds


def test_fractions_of_a_second_are_rounded_up_in_a_time_limit() -> None:
    assert grammar.time_limit(0.2) == "0:00:01"
    assert grammar.time_limit("1.5m") == "0:01:30"


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("16G", "16G"),
        ("16g", "16G"),
        ("16GB", "16G"),
        ("16 GiB", "16G"),
        ("1.5G", "1536M"),
        ("512M", "512M"),
        ("1024M", "1G"),
        ("2048G", "2T"),
        ("1T", "1T"),
        ("4096T", "4096T"),
        ("1K", "1K"),
        ("0.1K", "1K"),
    ],
)
def test_memory_sizes(text: str, normal: str) -> None:
    assert grammar.memory(text) == normal


@pytest.mark.parametrize("text", ["", "16", "G", "-1G", "16P", "16 Gb/s", "0G", "1e3G", 16, True, None, "9" * 20 + "G"])
def test_what_is_no_memory_size(text: object) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        grammar.memory(text)


@given(st.integers(1, 10**12), st.sampled_from("KMGT"))
def test_memory_is_exact_and_normal(number: int, unit: str) -> None:
    normal = grammar.memory(f"{number}{unit}")
    assert grammar.memory_bytes(normal) == number * 1024 ** ("KMGT".index(unit) + 1)
    assert grammar.memory(normal) == normal


@pytest.mark.parametrize(("text", "normal"), [(1, 1), ("4", 4), ("2:4", "2:4"), ("3:3", 3), (" 2 ", 2)])
def test_node_counts(text: object, normal: object) -> None:
    assert grammar.nodes(text) == normal


@pytest.mark.parametrize("text", [0, -1, "0:4", "4:2", ":4", "2:", "a", "", "1:2:3", 1.0, True, None, [1], "200000"])
def test_what_is_no_node_count(text: object) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        grammar.nodes(text)


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_node_ranges_are_accepted_in_order_only(low: int, high: int) -> None:
    if low > high:
        with pytest.raises(ValueError, match="exceeds"):
            grammar.nodes(f"{low}:{high}")
    else:
        assert grammar.nodes(f"{low}:{high}") == (low if low == high else f"{low}:{high}")


_PARSERS = (grammar.seconds, grammar.memory, grammar.nodes, grammar.env_name, grammar.module_name)


@given(st.text() | st.from_regex(r"[0-9]{1,30}[smhdKMGT:.-]{0,3}[0-9]{0,30}"), st.sampled_from(_PARSERS))
def test_parsers_answer_any_text_with_a_value_or_a_complaint(text: str, parser: Callable[[str], object]) -> None:
    complaint = ""
    try:
        parser(text)
    except ValueError as error:
        complaint = str(error)
    assert "Exceeds" not in complaint  # Python's own words about huge integers help nobody


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"lr": 0.1, "epochs": 3, "verbose": True}, ["--lr", "0.1", "--epochs", "3", "--verbose"]),
        ({"tags": ["a", 2, True], "x": None, "y": False, "z": []}, ["--tags", "a", "2", "true"]),
        ({"-n": 2, "--long": "x"}, ["-n", "2", "--long", "x"]),
        ({"shift": -0.5, "name": "-x", "-o": "-x"}, ["--shift", "-0.5", "--name=-x", "-o", "-x"]),
        ({"optimizer.lr": "1e-4", "empty": ""}, ["--optimizer.lr", "1e-4", "--empty", ""]),
    ],
)
def test_arguments_from_a_mapping(mapping: dict[str, object], words: list[str]) -> None:
    assert list(grammar.flags(mapping)) == words


@pytest.mark.parametrize("key", ["", "a b", "a=b", "a\n"])
def test_names_that_no_argument_can_have(key: str) -> None:
    with pytest.raises(grammar.LocatedError):
        grammar.flags({key: 1})
