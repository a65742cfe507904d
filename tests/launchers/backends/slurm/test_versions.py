"""Several versions of Slurm say the same in their words, and are understood alike (versions.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.backends.base import Cause, Phase
from orc.launchers.backends.slurm.client import SlurmClient
from orc.launchers.backends.slurm.discovery import discover, entry
from orc.launchers.backends.slurm.options import SlurmSettings
from orc.launchers.backends.slurm.queue_rows import ENDED, WAITING, JobRow, parse_squeue
from orc.launchers.backends.slurm.verdict import judge, waiting_reason
from orc.launchers.errors import AmbiguousSubmit, BackendUnreachable
from orc.launchers.remote.transport import LocalTransport

VERSIONS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "versions.yaml").read_text())

# Every state of the documentation of the newest version, and those that older ones had.
STATES = """
BOOT_FAIL CANCELLED COMPLETED COMPLETING CONFIGURING DEADLINE EXPEDITING FAILED LAUNCH_FAILED NODE_FAIL
OUT_OF_MEMORY PENDING POWER_UP_NODE PREEMPTED RECONFIG_FAIL REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING
RESV_DEL_HOLD REVOKED RUNNING SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT UPDATE_DB
"""


OLDER = """
case "$*" in *FailedNode*) echo 'sacct: error: Invalid field requested: "FailedNode"' >&2; exit 1;; esac
"""


class Slurm:
    """Programs that answer like one version."""

    def __init__(self, directory: Path, said: dict[str, Any]) -> None:
        self.directory = directory
        self.said = said
        self.answer("squeue", said["squeue"])
        self.answer("sinfo", said["sinfo"])
        self.answer("sbatch", said["version"])
        self.answer("scontrol", said["config"])
        self.answer("sacctmgr", "research")
        self.answer("sacct", said["sacct"], before=OLDER if said["fields"] == "older" else "")

    def answer(self, name: str, out: str, *, before: str = "") -> None:
        path = self.directory / name
        path.write_text(f"#!/bin/sh\n{before}\ncat <<'OUT'\n{out.rstrip()}\nOUT\n")
        path.chmod(0o755)

    def client(self) -> SlurmClient:
        return SlurmClient(LocalTransport(), SlurmSettings(bin=str(self.directory), query_timeout=30.0))


@pytest.fixture(params=VERSIONS)
def slurm_of(request: pytest.FixtureRequest, tmp_path: Path) -> Slurm:
    return Slurm(tmp_path, VERSIONS[request.param])


def verdict(row: JobRow) -> tuple[Phase, Cause | None]:
    seen = judge(row, AttemptRecords("/a1"), submitted_at=0.0, now=1e9, lead_s=10, asked_everyone=True)
    return seen.phase, seen.cause


def test_the_queue_is_understood(slurm_of: Slurm) -> None:
    rows = {row.job_id: row for row in slurm_of.client().queue(["101", "102_0", "102_1", "103", "104"])}
    assert {number: verdict(row)[0] for number, row in rows.items()} == {
        "101": Phase.RUNNING,
        "102_0": Phase.RUNNING,
        "102_1": Phase.PENDING,
        "103": Phase.RUNNING,
        "104": Phase.PENDING,
    }
    assert rows["101"].nodes == ("node1", "node2")
    assert (rows["101"].submitted_at, rows["101"].started_at, rows["101"].limit_s) == (1.7e9, 1.70000001e9, 3600.0)
    assert (rows["102_0"].limit_s, rows["102_0"].name) == (None, "orc-array-1")
    assert rows["103"].nodes == ("node1", "node3", "node4")
    assert waiting_reason(rows["102_1"]) == "JobArrayTaskLimit"
    assert "it may wait for ever" in waiting_reason(rows["104"])


def test_accounting_is_understood(slurm_of: Slurm) -> None:
    client = slurm_of.client()
    for _ in range(2):  # the second time it is known which fields there are
        rows = client.accounted(["90", "91", "92_0", "92_1", "93"])
        assert rows is not None
        found = {row.job_id: row for row in rows}
        assert {number: verdict(row) for number, row in found.items()} == {
            "90": (Phase.FAILED, Cause.NODE_FAILURE),
            "91": (Phase.CANCELLED, Cause.CANCELLED),
            "92_0": (Phase.CANCELLED, Cause.CANCELLED),
            "92_1": (Phase.CANCELLED, Cause.CANCELLED),
            "93": (Phase.SUCCEEDED, None),
        }
        assert found["90"].failed_node == ("node2" if slurm_of.said["fields"] == "newer" else "")
        assert (found["91"].by, found["91"].signal) == ("1000", 15)
        assert (found["92_0"].nodes, found["92_0"].limit_s) == ((), None)
        assert found["93"].nodes == ("node1", "node3", "node4")


def test_a_cluster_is_discovered(slurm_of: Slurm) -> None:
    options = {"bin": str(slurm_of.directory)}
    facts = discover(options)
    assert (facts.cluster, facts.version) == ("hpc", slurm_of.said["version"])
    assert facts.accounting is slurm_of.said["accounting"]
    cpu, gpu = facts.partitions
    assert (cpu.name, cpu.default, cpu.nodes, cpu.limit_s) == ("cpu", True, 2, 86400)
    assert (cpu.idle_nodes, cpu.idle_cpus) == (1, 12)
    assert (gpu.name, gpu.limit_s, gpu.gres[0].startswith("gpu:")) == ("gpu", None, True)
    made = yaml.safe_load(entry("hpc", facts, options))["hpc"]
    assert made["options"].get("accounting", True) is slurm_of.said["accounting"]
    assert made["options"].get("account", "research") == "research"


@pytest.mark.parametrize("state", STATES.split())
def test_every_state_is_waiting_or_ended_or_has_nodes(state: str) -> None:
    with_nodes = {"RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING", "UPDATE_DB"}
    assert sum(state in kind for kind in (WAITING, with_nodes, ENDED)) == 1


@pytest.mark.parametrize("state", ["SOMETHING_NEW", "COMPLETED+", ""])
def test_a_state_that_nobody_knows_ends_nothing(state: str) -> None:
    (row,) = parse_squeue(f"1|orc-a-000000-a1|{state}|1|1|1|30:00|node1|cpu|1|None")
    assert verdict(row)[0] is Phase.RUNNING


def test_the_components_of_a_heterogeneous_job_end_together() -> None:
    line = "{0}|n|{1}|1|1|1|30:00|node{2}|cpu|1|None"

    def state(*states: str) -> str:
        (row,) = parse_squeue("\n".join(line.format(f"7+{n}", one, n) for n, one in enumerate(states)))
        assert (row.job_id, row.nodes) == ("7", tuple(f"node{n}" for n in range(len(states))))
        return row.state

    assert state("RUNNING", "RUNNING") == "RUNNING"
    assert state("PENDING", "PENDING") == "PENDING"
    assert state("COMPLETED", "COMPLETING") == "COMPLETING"
    assert state("COMPLETED", "COMPLETED", "COMPLETED") == "COMPLETED"
    assert state("FAILED", "NODE_FAIL") == "NODE_FAIL"
    assert state("COMPLETED", "TIMEOUT") == "TIMEOUT"
    assert state("CANCELLED", "FAILED") == "FAILED"


# What controllers that cannot be reached make sbatch and squeue say, from 20.11 to 25.05.
@pytest.mark.parametrize(
    "said",
    [
        "Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation",
        "Zero Bytes were transmitted or received",
        "Slurm backup controller in standby mode",
        "Unexpected message received",
        "Transport endpoint is not connected",
        "Resource temporarily unavailable",
        "slurm_receive_msg: Connection refused",
    ],
)
def test_a_controller_that_is_away_is_never_a_refusal(tmp_path: Path, said: str) -> None:
    slurm = Slurm(tmp_path, VERSIONS["22.05"])
    slurm.answer("sbatch", "", before=f"echo 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1")
    slurm.answer("squeue", "", before=f"echo 'slurm_load_jobs error: {said}' >&2; exit 1")
    with pytest.raises(AmbiguousSubmit):
        slurm.client().submit([f"{tmp_path}/sbatch", "--parsable", "x"])
    with pytest.raises(BackendUnreachable):
        slurm.client().queue(["1"])
