"""YAML by the rules of 1.2, with positions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orc.launchers.errors import SpecError
from orc.launchers.spec import source


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("tRue", "tRue"),
        ("1:30:00", "1:30:00"),
        ("2:4", "2:4"),
        ("2026-01-01", "2026-01-01"),
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", float("-inf")),
        ("1_000", "1_000"),
        ("007", "007"),
        ("00.5", "00.5"),
        ("-01", "-01"),
        ("0", 0),
        ("-0", 0),
        ("0.5", 0.5),
        ("0x1F", 31),
        ("0o17", 15),
        ("0b1", "0b1"),
        ("+3", 3),
        ("~", None),
        ("null", None),
        ("", None),
        ("=", "="),
        ("'1'", "1"),
        ('"true"', "true"),
        ("!!str 1", "1"),
        ("!!int '3'", 3),
        ("!!float 3", 3.0),
        (".", "."),
        ("..", ".."),
        ("+", "+"),
        ("1.2.3", "1.2.3"),
        ("|\n  a\n  b\n", "a\nb\n"),
        (">-\n  a\n  b\n", "a b"),
    ],
)
def test_scalars_are_what_yaml_1_2_says(text: str, value: object) -> None:
    read = source.parse(f"a: {text}", "f").data["a"]
    assert read == value
    assert type(read) is type(value)


def test_keys_are_text_as_written() -> None:
    assert list(source.parse("on: 1\n2: 3\nno: 4\n1.0: 5\nnull: 6", "f").data) == ["on", "2", "no", "1.0", "null"]


def test_positions_of_keys_and_values() -> None:
    document = source.parse("a:\n  b: [1, {c: 2}]\n", "f")
    assert document.keys[("a", "b")].where == "f:2:3"
    assert document.values[("a", "b")].where == "f:2:6"
    assert document.values[("a", "b", 0)].where == "f:2:7"
    assert document.keys[("a", "b", 1, "c")].where == "f:2:11"
    assert document.values[("a", "b", 1, "c")].where == "f:2:14"


def test_position_of_what_is_not_there_is_that_of_the_nearest_part() -> None:
    document = source.parse("a:\n  b: 1\n", "f")
    assert document.origin(("a", "x", "y")).where == "f:2:3"
    assert document.origin(("z",), key=True).where == "f:1:1"


def test_columns_count_characters() -> None:
    document = source.parse("ä: {ö: 1, u: 2}\n", "f")
    assert document.values[("ä", "u")].where == "f:1:14"


def test_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Any) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert source.parse(source.read_file(path, "job file"), "f").data == {"a": 1, "b": "x"}


def test_anchors_and_merges() -> None:
    text = """\
base: &base {a: 1, b: {c: 2}}
more: &more {<<: *base, a: 5, d: 3}
one: {<<: *base, a: 9}
two:
  <<: [*more, *base]
  b: 0
"""
    data = source.parse(text, "f").data
    assert data["more"] == {"a": 5, "b": {"c": 2}, "d": 3}
    assert data["one"] == {"a": 9, "b": {"c": 2}}
    assert data["two"] == {"a": 5, "b": 0, "d": 3}


def test_merged_values_are_reported_where_they_are_written() -> None:
    document = source.parse("base: &b {a: 1}\none: {<<: *b}\n", "f")
    assert document.values[("one", "a")].where == "f:1:14"


def test_merged_copies_do_not_share_state() -> None:
    data = source.parse("base: &b {a: {c: 1}}\none: {<<: *b}\n", "f").data
    data["one"]["a"]["c"] = 2
    assert data["base"]["a"]["c"] == 1


def test_quoted_merge_key_is_a_key() -> None:
    assert source.parse("'<<': 1", "f").data == {"<<": 1}


def test_merge_that_contains_itself_is_refused() -> None:
    with pytest.raises(SpecError, match="contains it"):
        source.parse("a: &a\n  <<: *a\n", "f")


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_documents = st.dictionaries(
    st.text(min_size=1),
    st.recursive(
        _scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    ),
    min_size=1,
    max_size=5,
)


class _Quoting(yaml.SafeDumper):
    """PyYAML leaves texts bare that are numbers by YAML 1.2, such as 1e5; here every text is quoted."""


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


@given(_documents, st.sampled_from([None, True, False]))
def test_what_pyyaml_writes_is_read_back(data: dict[str, Any], flow: bool | None) -> None:
    assert source.parse(yaml.dump(data, Dumper=_Quoting, default_flow_style=flow), "f").data == data


def _place_of_complaint(text: str) -> str | None:
    try:
        source.parse(text, "file")
    except SpecError as error:
        return error.where
    return None


@given(st.text(max_size=200) | st.text(alphabet="ab:-[]{}&*<>|'\"\n #!,?%@`\t", max_size=60))
def test_any_text_gives_data_or_one_complaint_with_its_place(text: str) -> None:
    place = _place_of_complaint(text)
    assert place is None or re.fullmatch(r"file(:\d+:\d+)?", place)
