"""Which hosts a job gets, given what others hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orc.launchers.backends.base import Placement
from orc.launchers.backends.ssh.rendering import candidates, place
from orc.launchers.backends.ssh.settings import read_settings
from orc.launchers.errors import NoRoom, RenderError
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster


def test_hosts_are_filled_in_the_order_of_the_file(settings, job) -> None:
    assert place(job(nodes=2), settings(), {}) == Placement(("a", "b"), 1)


def test_a_host_without_slots_takes_one_job_however_large(settings, job) -> None:
    assert place(job(nodes=1, procs_per_node=64), settings(), {}) == Placement(("a",), 64)
    assert place(job(nodes=1), settings(), {"a": 64}) == Placement(("b",), 1)


def test_hosts_with_slots_are_shared(settings, job) -> None:
    lab = settings(slots=4)
    assert place(job(procs_per_node=2), lab, {"a": 2}) == Placement(("a",), 2)
    assert place(job(procs_per_node=2), lab, {"a": 3}) == Placement(("b",), 2)
    assert place(job(gpus_per_node=4, procs_per_node=1), lab, {"a": 1}) == Placement(("b",), 4)
    assert place(job(procs_per_node=4, ssh={"slots": 1}), lab, {"a": 3}) == Placement(("a",), 1)


def test_a_job_waits_when_too_few_hosts_are_free(settings, job) -> None:
    with pytest.raises(NoRoom, match=r"waiting for 2 hosts; 1 free, taken: a, c"):
        place(job(nodes=2), settings(), {"a": 1, "c": 1})
    with pytest.raises(NoRoom, match=r"waiting for 1 host with 3 free slots each"):
        place(job(procs_per_node=3), settings(slots=4), {"a": 2, "b": 2, "c": 2})


def test_an_elastic_job_takes_what_is_free(settings, job) -> None:
    assert place(job(nodes="1:3"), settings(), {}).hosts == ("a", "b", "c")
    assert place(job(nodes="2:4"), settings(), {"b": 1}).hosts == ("a", "c")
    with pytest.raises(NoRoom):
        place(job(nodes="2:4"), settings(), {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"nodes": 4}, "the job needs 4 hosts, and the cluster has 3"),
        ({"nodes": "5:9"}, "the job needs 5 hosts, and the cluster has 3"),
        ({"procs_per_node": 5}, "the job needs 1 host with 5 slots, and none of the cluster's 3 hosts is one"),
        ({"nodes": 3, "ssh": {"exclude": ["a"]}}, "the job needs 3 hosts, and 2 of the cluster's 3 hosts are left"),
        ({"nodes": 2, "ssh": {"labels": ["big"]}}, "2 hosts with the label big, and 1 of the cluster's 3"),
    ],
)
def test_a_job_that_never_fits_is_refused(settings, job, resources, said) -> None:
    lab = settings(slots=4, hosts=["a", "b", {"name": "c", "labels": ["big"]}])
    with pytest.raises(RenderError) as caught:
        place(job(**resources), lab, {})
    assert said in str(caught.value)


def test_a_job_chooses_among_the_hosts(settings, job) -> None:
    lab = settings(hosts=["a", {"name": "b", "labels": ["big", "new"]}, {"name": "c", "labels": "big"}])
    assert place(job(ssh={"labels": "big"}), lab, {}).hosts == ("b",)
    assert place(job(ssh={"labels": ["big", "new"]}, nodes=1), lab, {}).hosts == ("b",)
    assert place(job(ssh={"hosts": ["c", "a"]}, nodes=2), lab, {}).hosts == ("c", "a")
    assert place(job(ssh={"exclude": "a"}, nodes=2), lab, {}).hosts == ("b", "c")
    assert candidates(job(ssh={"labels": "big"}), lab) == ("b", "c")


def test_hosts_that_failed_before_are_used_only_when_the_job_could_not_run_without_them(settings, job) -> None:
    lab = settings()
    assert place(job(nodes=2), lab, {}, avoid={"a"}).hosts == ("b", "c")
    assert place(job(nodes=3), lab, {}, avoid={"a"}).hosts == ("b", "c", "a")
    assert place(job(nodes="2:3"), lab, {}, avoid={"b"}).hosts == ("a", "c")
    with pytest.raises(NoRoom):  # waiting for a good host is better than failing again
        place(job(nodes=2), lab, {"c": 1}, avoid={"a"})


@given(
    slots=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    jobs=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 4)), max_size=12),
)
def test_no_slot_is_ever_given_twice(slots, jobs) -> None:
    hosts = [{"name": f"h{number}", "slots": count} for number, count in enumerate(slots)]
    lab = read_settings(Cluster(name="lab", kind="ssh", root="/r", options={"hosts": hosts}))
    taken: dict[str, int] = {}
    held: dict[str, int] = {}
    for fewest, more, processes in jobs:
        resources = {"nodes": f"{fewest}:{fewest + more}", "procs_per_node": processes}
        try:
            placed = place(JobSpec.model_validate({"name": "x", "script": "x", "resources": resources}), lab, taken)
        except (NoRoom, RenderError):
            continue
        assert fewest <= len(placed.hosts) <= fewest + more
        assert len(set(placed.hosts)) == len(placed.hosts)
        for name in placed.hosts:
            taken[name] = taken.get(name, 0) + placed.slots
            held[name] = held.get(name, 0) + 1
    for host in lab.hosts:
        if host.slots:
            assert taken.get(host.name, 0) <= host.slots
        else:
            assert held.get(host.name, 0) <= 1
