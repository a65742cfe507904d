"""Manifests: canonical digests, and nothing that could leave the tree."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import EXECUTABLE, FILE, follow
from orc.launchers.snapshot.scan import Bundle, Entry, format_size, size_findings

ZERO = "0" * 64
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\\", exclude_categories=("Cc", "Zl", "Zp")), min_size=1
).filter(lambda n: n not in (".", ".."))
SHAS = st.text("0123456789abcdef", min_size=64, max_size=64)


def entry(path: str, mode: int = FILE, size: int = 1) -> Entry:
    return Entry(path, mode, ZERO, size)


@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from((FILE, EXECUTABLE)), SHAS, st.integers(0, 2**50))), st.randoms()
)
def test_the_digest_ignores_order_and_survives_json(files: dict[str, tuple[int, str, int]], random: Any) -> None:
    entries = [Entry(path, *rest) for path, rest in files.items()]
    bundle = Bundle.of(entries)
    random.shuffle(entries)
    assert Bundle.of(entries) == bundle
    assert Bundle.from_dict(json.loads(json.dumps(bundle.to_dict()))) == bundle


def test_the_digest_is_stable_over_releases() -> None:
    # Stores on clusters are shared by orc versions: a change here must change the manifest's format.
    bundle = Bundle.of([entry("a/b.py"), entry("run.sh", EXECUTABLE), Entry.link("latest", "a/b.py")])
    assert bundle.digest == "74b894e9fa4cbfa63d6732003ea21236973a1bb3139657b54a1f9298c191ed5e"


@pytest.mark.parametrize(
    "other",
    [
        [entry("a", EXECUTABLE)],
        [entry("b")],
        [entry("a", size=2)],
        [Entry("a", FILE, "1" * 64, 1)],
        [Entry.link("a", "b")],
        [entry("a"), entry("b")],
        [],
    ],
)
def test_the_digest_sees_paths_modes_contents_and_targets(other: list[Entry]) -> None:
    assert Bundle.of(other).digest != Bundle.of([entry("a")]).digest


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "", "a/", "a\0b", "a\nb", "C:/x"]
)
def test_paths_that_could_leave_the_tree_are_refused(path: str) -> None:
    with pytest.raises(BundleError, match="inside the tree"):
        Bundle.of([entry(path)])


@pytest.mark.parametrize(
    ("path", "target"),
    [("a", "/etc/passwd"), ("a", "../x"), ("a/b", "../../x"), ("a", "b/../../x"), ("a", "b/c/../../../x")],
)
def test_links_out_of_the_tree_are_refused(path: str, target: str) -> None:
    with pytest.raises(BundleError, match="outside the tree"):
        Bundle.of([Entry.link(path, target)])


def test_a_link_that_leaves_through_another_link_is_refused() -> None:
    # As text, sub/up/../x is sub/x; the kernel goes to the root by sub/up and leaves from there.
    with pytest.raises(BundleError, match="outside the tree"):
        Bundle.of([Entry.link("sub/up", ".."), Entry.link("a", "sub/up/../x")])


def test_links_inside_the_tree_are_followed_as_the_kernel_does() -> None:
    links = {"d": "real/deep", "l": "d/../x", "loop": "loop"}
    assert follow("l", links) == "real/x"
    assert follow("d/y", links) == "real/deep/y"
    assert follow("loop", links) == "loop"
    assert follow("plain", links) == "plain"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("a"), entry("a")], "twice"),
        ([entry("a"), entry("a/b")], "below 'a'"),
        ([Entry.link("a", "b"), entry("a/b")], "below 'a'"),
        ([Entry("a", FILE, "xyz", 1)], "malformed"),
        ([Entry("a", FILE, ZERO, -1)], "malformed"),
        ([Entry("a", FILE, ZERO, 1, "b")], "malformed"),
        ([Entry("a", Entry.link("a", "b").mode, ZERO, 1, "b")], "hash"),
    ],
)
def test_contradictory_entries_are_refused(entries: list[Entry], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        Bundle.of(entries)


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.update(digest="0" * 64),
        lambda m: m.update(format=99),
        lambda m: m.pop("entries"),
        lambda m: m["entries"][0].update(path="../evil"),
        lambda m: m["entries"][0].update(mode="4755"),
        lambda m: m["entries"][0].update(size="big"),
        lambda m: m["entries"].append("text"),
        lambda m: m.update(entries=None),
    ],
)
def test_a_tampered_manifest_is_refused(damage: Any) -> None:
    manifest = Bundle.of([entry("a"), entry("b")]).to_dict()
    damage(manifest)
    with pytest.raises(BundleError):
        Bundle.from_dict(manifest)


def test_sizes_are_warned_about_from_100_mb_in_all_or_50_mb_in_one() -> None:
    mb = 1000**2
    assert not size_findings(Bundle.of([entry("a", size=50 * mb), entry("b", size=50 * mb)]))
    (total,) = size_findings(Bundle.of([entry(f"d/{n}", size=40 * mb) for n in range(3)]))
    assert total.level == "warning"
    assert "3 files, 120.0 MB" in total.what
    (single,) = size_findings(Bundle.of([entry("model.bin", size=51 * mb), entry("a.py")]))
    assert "model.bin (51.0 MB)" in single.what
    assert ".orcignore" in single.hint


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (1_500_000, "1.5 MB"), (2 * 10**12, "2.0 TB")],
)
def test_sizes_are_shown_in_decimal_units(size: int, text: str) -> None:
    assert format_size(size) == text
