"""Shapes of slices by the names of accelerator types."""

from __future__ import annotations

import pytest

from orc.launchers.backends.tpu.accelerators import check, for_hosts, parse


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "processes"),
    [
        ("v2-8", 4, 1, 4),
        ("v3-32", 16, 4, 4),
        ("v4-8", 4, 1, 4),
        ("v4-16", 8, 2, 4),
        ("v4-24", 12, 3, 4),
        ("v5litepod-1", 1, 1, 1),
        ("v5litepod-8", 8, 1, 8),
        ("v5litepod-16", 16, 4, 4),
        ("v5e-16", 16, 4, 4),
        ("v5p-16", 8, 2, 4),
        ("v6e-8", 8, 1, 8),
        ("V6E-256", 256, 64, 4),
    ],
)
def test_a_type_says_how_many_chips_machines_and_processes_there_are(name, chips, hosts, processes) -> None:
    shape = parse(name)
    assert (shape.chips, shape.hosts, shape.chips_per_host) == (chips, hosts, processes)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu-8", "no accelerator type; there are v2, v3"),
        ("v9-8", "no accelerator type"),
        ("v4-4", "the sizes of v4 are 8, 16"),
        ("v4-10", "there is no v4-10"),
        ("v2-16", "the sizes of v2 are 8, 32, 128"),
        ("v6e-12", "the sizes of v6e are 1, 4, 8, 16, 32"),
        ("v5p-99999", "there is no v5p-99999"),
        ("v4", "write for example v4-8"),
        ("v4-", "no accelerator type"),
    ],
)
def test_a_type_that_does_not_exist_is_refused_with_those_that_do(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace(".", r"\.")):
        parse(name)


@pytest.mark.parametrize(
    ("name", "hosts", "found"),
    [
        ("v4", None, "v4-8"),
        ("v4", 1, "v4-8"),
        ("v4", 4, "v4-32"),
        ("v5e", 1, "v5litepod-8"),
        ("v6e", 4, "v6e-16"),
        ("v4-32", None, "v4-32"),
        ("v4-32", 4, "v4-32"),
    ],
)
def test_a_generation_gets_the_size_that_the_nodes_need(name: str, hosts: int | None, found: str) -> None:
    assert for_hosts(name, hosts).accelerator_type == found


@pytest.mark.parametrize(
    ("name", "hosts", "says"),
    [
        ("v4-32", 2, "v4-32 has 4 worker machines, and the job asks for 2 nodes"),
        ("v4-8", 2, "v4-8 has 1 worker machine, and"),
        ("v6e", 3, "no v6e has 3 worker machines"),
        ("v6e", 2, "no v6e has 2 worker machines"),
        ("v2", 2, "no v2 has 2 worker machines"),
    ],
)
def test_a_number_of_nodes_that_no_slice_has_is_refused(name: str, hosts: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        for_hosts(name, hosts)


def test_types_are_spelled_as_the_service_does() -> None:
    assert [check(name) for name in ("V4-16", "v5e-8", "v5e", " v6e ")] == ["v4-16", "v5litepod-8", "v5litepod", "v6e"]
