"""What is found out about hosts one by one, and by comparing them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.errors import BackendUnreachable
from orc.launchers.hosts.checks import (
    HostFacts,
    compare_hosts,
    find_missing_torch,
    gather_facts,
    unusable_hosts,
)
from orc.launchers.remote.programs import source
from orc.launchers.remote.transport import Completed, LocalTransport

FACTS: dict[str, Any] = {
    "host": "n",
    "python": [3, 11, 7],
    "executable": "/opt/venv/bin/python",
    "cpus": 8,
    "load": 0.0,
    "memory": {"total": 1, "free": 1},
    "root": "/home/me/orc",
    "free": 10**12,
    "writable": True,
    "torch": "2.4.0",
    "cuda": "12.4",
    "gpus": [],
    "gpus_known": 0,
    "gpu_error": None,
    "now": 0.0,
}
GPU = {
    "index": "0",
    "name": "H100",
    "driver": "550.1",
    "temperature": "50",
    "ecc": "0",
    "throttle": "0x0000000000000000",
}


def hosts(*changes: dict[str, Any], skews: tuple[float, ...] = ()) -> list[HostFacts]:
    return [
        HostFacts(f"node{number}", {**FACTS, **change}, skews[number - 1] if skews else 0.0)
        for number, change in enumerate(changes, 1)
    ]


def said(facts_by_host: list[HostFacts], **options: Any) -> list[tuple[str, str, str]]:
    return [(finding.level, finding.where, finding.what) for finding in compare_hosts(facts_by_host, **options)]


def test_equal_hosts_are_fine() -> None:
    assert said(hosts({}, {}, {})) == []


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"python": [3, 12, 1]}, ("warning", "node2", "Python: it has 3.12, the others 3.11")),
        ({"torch": "2.3.1"}, ("error", "node2", "torch: it has 2.3.1, the others 2.4.0")),
        ({"torch": None}, ("error", "node2", "torch: it has no torch, the others 2.4.0")),
        ({"free": 10**8}, ("error", "node2", "only 100 MB are free in /home/me/orc")),
        ({"free": 10**9}, ("warning", "node2", "only 1000 MB are free in /home/me/orc")),
        ({"writable": False}, ("error", "node2", "/home/me/orc cannot be written")),
        ({"python": [3, 8, 2]}, ("error", "node2", "/opt/venv/bin/python is Python 3.8.2; ranks need 3.10 or newer")),
        ({"python": [3, 9, 18]}, ("error", "node2", "/opt/venv/bin/python is Python 3.9.18; ranks need 3.10 or newer")),
        ({"gpu_error": "No devices were found"}, ("error", "node2", "nvidia-smi: No devices were found")),
    ],
)
def test_the_odd_one_out_is_named(change: dict[str, Any], finding: tuple[str, str, str]) -> None:
    assert finding in said(hosts({}, change, {}))
    assert {where for _, where, _ in said(hosts({}, change, {}))} == {"node2"}


def test_two_that_differ_are_both_named() -> None:
    (finding,) = said(hosts({}, {"torch": "2.3.1"}))
    assert finding[2] == "torch differs: node1 2.4.0, node2 2.3.1"
    # A job that brings its own environment does not care.
    assert said(hosts({}, {"torch": "2.3.1"}), environment=True) == []


def test_of_two_hosts_the_one_without_torch_is_to_blame() -> None:
    assert said(hosts({"torch": None}, {})) == [("error", "node1", "torch: it has no torch, the others 2.4.0")]
    assert [where for _, where, _ in said(hosts({}, {"torch": None}))] == ["node2"]


def test_the_health_of_gpus_is_looked_at() -> None:
    sick = {**GPU, "index": "1", "ecc": "3", "throttle": "0x0000000000000008"}
    found = said(hosts({"gpus": [GPU, GPU], "gpus_known": 2}, {"gpus": [GPU, sick], "gpus_known": 3}))
    assert ("error", "node2", "1 of 3 GPUs do not answer") in found
    assert ("error", "node2", "GPU 1 (H100) has 3 uncorrected memory errors since the driver was loaded") in found
    assert ("warning", "node2", "GPU 1 (H100) is slowed down: hardware slowdown") in found
    other = {**GPU, "driver": "535.9", "ecc": "[N/A]"}
    found = said(hosts({"gpus": [GPU]}, {"gpus": [other]}, {"gpus": [GPU]}), gpus=2)
    assert ("warning", "node2", "GPU driver: it has 535.9, the others 550.1") in found
    assert ("error", "node1", "it has 1 GPUs, the job asks for 2") in found
    # AMD's have no nvidia-smi, and where nobody can tell, nobody is refused.
    assert said(hosts({"gpus_known": 8}, {"gpus_known": None}), gpus=8) == []
    assert ("warning", "node3", "number of GPUs: it has 1, the others 2") in said(
        hosts({"gpus": [GPU, GPU]}, {"gpus": [GPU, GPU]}, {"gpus": [GPU]})
    )


def test_a_torch_for_the_cpu_is_named_where_a_job_asks_for_gpus() -> None:
    many = {"gpus": [GPU, GPU], "gpus_known": 2}
    cpu = {**many, "torch": "2.4.0", "cuda": None}
    what = "its torch, 2.4.0, is built for the CPU alone, and the job asks for 2 GPUs on each node"
    assert said(hosts(many, cpu), gpus=2) == [("warning", "node2", what)]
    assert said(hosts(many, cpu)) == said(hosts(many, cpu), gpus=2, environment=True) == []


def test_a_clock_that_is_wrong_is_named_and_so_is_ours() -> None:
    assert said(hosts({}, {}, {}, skews=(0.0, 3600.0, 1.0))) == [
        ("warning", "node2", "its clock is 60 min ahead of the others")
    ]
    assert said(hosts({}, {}, {}, skews=(-99.0, -100.0, -101.0))) == [
        ("warning", "this machine", "this machine's clock is 100 s ahead of the hosts'")
    ]


def test_a_host_that_does_not_answer_says_nothing_about_the_plan() -> None:
    (finding,) = compare_hosts(
        [*hosts({}), HostFacts("node9", error=BackendUnreachable("no route to host", hint="Is it on?"))]
    )
    assert (finding.where, finding.unreachable, finding.hint) == ("node9", True, "Is it on?")
    assert unusable_hosts([finding]) == ["node9"]


def test_this_machine_can_be_looked_at_within_a_second(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    transports = {name: LocalTransport() for name in names}
    roots, pythons = dict.fromkeys(names, str(tmp_path / "not/there/yet")), dict.fromkeys(names, sys.executable)
    began = time.monotonic()
    facts_by_host = gather_facts(transports, roots, pythons)
    assert time.monotonic() - began < 5  # usually 0.1
    facts = facts_by_host[0].facts
    assert tuple(facts["python"]) == sys.version_info[:3]
    assert facts["torch"].startswith("2.")
    assert (facts["writable"], facts_by_host[0].skew_s) == (True, 0.0)
    assert {f.level for f in compare_hosts(facts_by_host)} <= {"warning"}


def test_a_python_that_does_not_run_or_prints_nonsense_is_told(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho welcome\n")
    script.chmod(0o755)
    transports = {"a": LocalTransport(), "b": LocalTransport()}
    roots = dict.fromkeys("ab", "/tmp")
    found = compare_hosts(gather_facts(transports, roots, {"a": str(script), "b": "/no/python"}))
    assert [(f.level, f.where) for f in found] == [("error", "a"), ("error", "b")]
    assert "printed something else than was asked for: 'welcome" in found[0].what
    assert "/no/python: command not found" in found[1].what


class AnHourAhead(LocalTransport):
    """A host whose clock is wrong."""

    def run(self, *args: Any, **kwargs: Any) -> Completed:
        done = super().run(*args, **kwargs)
        facts = json.loads(done.stdout)
        facts["now"] += 3600
        return Completed(done.argv, done.status, json.dumps(facts), done.stderr)


def test_an_hour_of_skew_is_measured() -> None:
    (only,) = gather_facts({"a": AnHourAhead()}, {"a": "/tmp"}, {"a": sys.executable})
    assert 3599 - only.took_s < only.skew_s < 3601


def test_nvidia_smi_is_read(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho '0, NVIDIA H100, 550.54, 10, 81559, 3, 41, 0, 0x0000000000000001'\n"
        "echo '1, NVIDIA H100, 550.54, 10, 81559, 3, 41, [N/A], 0x0000000000000040'\n"
    )
    smi.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"{source('hosts.probe')}\nmain()", "facts", "/tmp"],
        env=env,
        capture_output=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    assert [gpu["name"] for gpu in facts["gpus"]] == ["NVIDIA H100", "NVIDIA H100"]
    assert [what for _, _, what in said([HostFacts("n", {**facts, "free": 10**12})])] == [
        "GPU 1 (NVIDIA H100) is slowed down: too hot"
    ]


def test_that_no_host_has_torch_is_said_once() -> None:
    none = {"torch": None}
    (finding,) = find_missing_torch([*hosts(none, none), HostFacts("node3", error=BackendUnreachable("silent"))])
    assert (finding.level, finding.where) == ("warning", "node1")
    assert finding.what == "/opt/venv/bin/python has no torch, on no host"
    assert find_missing_torch(hosts(none, {})) == []
    assert find_missing_torch([]) == []
