"""How two snapshots differ."""

from __future__ import annotations

import hashlib

from orc.launchers.snapshot.manifest import EXECUTABLE, FILE, Bundle, Entry
from orc.launchers.transfer.delivery import compare, lacking


def file(path: str, text: str, mode: int = FILE) -> Entry:
    return Entry(path, mode, hashlib.sha256(text.encode()).hexdigest(), len(text))


OLD = Bundle.of([file("a", "1"), file("b", "2"), file("c", "3"), Entry.link("l", "a"), file("same", "s")])
NEW = Bundle.of(
    [file("a", "changed"), file("b", "2", EXECUTABLE), file("d", "3"), Entry.link("l", "b"), file("same", "s")]
)


def test_contents_modes_and_targets_count_as_changes() -> None:
    found = compare(OLD, NEW)
    assert [entry.path for entry in found.new] == ["d"]
    assert [entry.path for entry in found.changed] == ["a", "b", "l"]
    assert [entry.path for entry in found.removed] == ["c"]
    assert found.unchanged == 1


def test_without_an_earlier_snapshot_everything_is_new() -> None:
    found = compare(None, NEW)
    assert (len(found.new), found.unchanged) == (5, 0)


def test_a_file_is_lacking_when_its_content_is() -> None:
    missing = {hashlib.sha256(b"changed").hexdigest()}
    assert [entry.path for entry in lacking(NEW, missing)] == ["a"]
    assert lacking(NEW, ()) == []
