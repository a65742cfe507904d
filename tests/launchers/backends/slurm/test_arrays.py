"""Arrays and dependencies: many attempts in one submission, and attempts that wait for others."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from slurm_testbed import eventually

from orc.launchers.backends import open_backend
from orc.launchers.backends.base import Handle, Phase, SupportsArrays
from orc.launchers.backends.slurm import SlurmBackend, submission
from orc.launchers.errors import AmbiguousSubmit, BackendError
from orc.launchers.plan import Plan
from orc.launchers.spec.clusters import Cluster

# -- what is sent


def another(plan: Plan, number: int = 2) -> Plan:
    """The same plan as a later attempt."""
    attempt = replace(plan.attempt, number=number)
    files = [
        replace(f, path=f.path.replace("/a1/", f"/a{number}/"), content=f.content.replace(plan.marker, attempt.marker))
        for f in plan.files
    ]
    return replace(plan, attempt=attempt, files=tuple(files))


def test_the_script_of_an_array_asks_for_what_each_element_does_and_runs_the_element_s_own(plan_of) -> None:
    plan = plan_of(resources={"options": {"slurm": {"modules": ["cuda"], "partition": "gpu", "comment": "mine"}}})
    text = submission.array_script(plan, "/shared/my orc/arrays/orc-array-1")
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    whole = [line for line in submission.script_of(plan).splitlines() if line.startswith("#SBATCH")]
    assert asked == [line for line in whole if not re.match(r"#SBATCH --(job-name|comment|chdir|output)=", line)]
    assert len(whole) == len(asked) + 4
    assert text.startswith("#!/bin/bash -l\n#SBATCH")
    assert text.splitlines()[-1] == """. '/shared/my orc/arrays/orc-array-1'/"$SLURM_ARRAY_TASK_ID"/job.sbatch"""
    assert subprocess.run(["bash", "-n"], input=text.encode()).returncode == 0


def test_the_command_line_says_what_the_array_is() -> None:
    assert submission.array_options("orc-array-1", 5, 2, "/a/50%/x") == [
        "--array=0-4%2",
        "--job-name=orc-array-1",
        "--comment=orc-array-1",
        "--chdir=/a/50%/x",
        "--output=/a/50%%/x/%a/logs/launcher.log",
    ]
    assert submission.array_options("orc-array-1", 1, None, "/a")[0] == "--array=0-0"


def test_attempts_that_ask_for_different_things_make_no_array(plan_of) -> None:
    submission.check_alike([plan_of(), another(plan_of())])
    with pytest.raises(BackendError, match=re.escape("asks for --nodes=2-4, not for --nodes=1")):
        submission.check_alike([plan_of(), another(plan_of(resources={"nodes": "2:4"}))])


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"elements": 3}', b'{"elements": [{"array": "x"}]}'])
def test_a_broken_record_names_no_element(record: bytes) -> None:
    assert submission.elements_of(record) == []


# -- handles

FIRST = Handle("hpc", "slurm", "orc-first-a1", "12", 1.0)
ELEMENT = Handle("hpc", "slurm", "orc-second-a1", "13_4", 1.0, group="orc-array-1")


def test_an_element_s_handle_survives_the_ledger() -> None:
    assert Handle.from_dict(ELEMENT.to_dict()) == ELEMENT
    assert "group" not in FIRST.to_dict()
    assert Handle.from_dict(FIRST.to_dict()) == FIRST


@pytest.mark.parametrize("kind", ["local", "slurm", "ssh"])
def test_only_slurm_has_arrays(kind: str) -> None:
    options = {"hosts": ["gpu1"]} if kind == "ssh" else {}
    backend = open_backend(Cluster(name="c", kind=kind, root="/r", options=options))
    assert isinstance(backend, SupportsArrays) == (kind == "slurm")


# -- on the cluster

# Says who it is, and waits until it is told to go.
WAITS = """
import os, sys, time
job = os.environ["ORC_JOB_DIR"]
print("up", os.environ["ORC_MARKER"], flush=True)
while not os.path.exists(job + "/go"):
    time.sleep(0.1)
print("gone", flush=True)
"""
OK = "print('ok')"


class Several:
    """Attempts of one script, submitted together."""

    def __init__(self, runs, count: int, script: str = WAITS, **spec) -> None:
        made = [runs.prepare(script, **spec) for _ in range(count)]
        self.backend: SlurmBackend = made[0].backend
        self.runs = made
        self.plans = [run.plan for run in made]

    def submit(self, **more) -> list[Handle]:
        handles = self.backend.submit_array(self.plans, {"TOKEN": "s3cret"}, **more)
        for run, handle in zip(self.runs, handles, strict=True):
            run.handle = handle
        return handles

    def phases(self) -> list[Phase]:
        seen = self.backend.poll([run.handle for run in self.runs])
        return [seen[run.handle].phase for run in self.runs]

    def go(self, *numbers: int) -> None:
        for number in numbers:
            (self.runs[number].directory.parent / "go").touch()


def test_an_array_runs_so_many_at_once_and_each_element_is_an_attempt_of_its_own(runs) -> None:
    some = Several(runs, 4, secrets={"TOKEN": "s3cret"})
    handles = some.submit(at_once=2)
    job_id = handles[0].native_id.partition("_")[0]
    assert [handle.native_id for handle in handles] == [f"{job_id}_{n}" for n in range(4)]
    assert len({handle.group for handle in handles}) == 1
    assert [handle.marker for handle in handles] == [plan.marker for plan in some.plans]
    for number in (0, 1):
        some.runs[number].until_said(f"up {some.plans[number].marker}")
    assert some.phases() == [Phase.RUNNING] * 2 + [Phase.PENDING] * 2
    assert some.runs[3].poll().reason == "JobArrayTaskLimit"
    assert {job.marker for job in some.backend.queue(handles).jobs} == {plan.marker for plan in some.plans}
    # Found by their markers alone, whether they run or wait.
    assert [some.backend.find(plan.marker) for plan in some.plans] == [
        replace(handle, submitted_at=some.backend.find(handle.marker).submitted_at) for handle in handles
    ]
    # One that waits and one that runs are cancelled; the others do not mind.
    some.backend.cancel([handles[0], handles[2]], timedelta(seconds=5))
    eventually(lambda: some.runs[2].poll().phase is Phase.CANCELLED)
    eventually(lambda: some.runs[0].poll().phase is Phase.CANCELLED, timeout_s=60)
    some.go(1, 3)
    assert some.runs[1].ended().phase is Phase.SUCCEEDED
    assert some.runs[3].ended().phase is Phase.SUCCEEDED
    assert some.phases() == [Phase.CANCELLED, Phase.SUCCEEDED, Phase.CANCELLED, Phase.SUCCEEDED]
    # Logs and records are each one's own; no secret is left behind by those that ran.
    assert some.runs[3].log(0).split() == ["up", some.plans[3].marker, "gone"]
    assert f"job {handles[3].native_id}, restart 0" in (some.runs[3].directory / "logs" / "launcher.log").read_text()
    assert not (some.runs[3].directory / "secrets.json").exists()
    assert not (some.runs[2].directory / "node-0").exists()
    selectors = some.backend.log_selectors(handles[1])
    assert [selector.rank for selector in selectors if selector.rank is not None] == [0]
    assert selectors[-1].launcher

    # What a later look will be told, when the controller has forgotten them.
    def accounted() -> list[str]:
        rows = some.backend._client.accounted(handle.native_id for handle in handles) or []
        known = {row.job_id: row.state for row in rows if row.ended}
        return [known.get(handle.native_id, "") for handle in handles]

    # The first has ended as Slurm's scancel or as its own script's exit status has it.
    eventually(lambda: accounted()[1:] == ["COMPLETED", "CANCELLED", "COMPLETED"] and accounted()[0])


def test_a_node_of_an_element_can_be_entered(runs) -> None:
    some = Several(runs, 2)
    handles = some.submit()
    some.runs[1].until_said("up")
    (entry,) = some.backend.entries(handles[1])
    shown = subprocess.run(entry.argv(["sh", "-c", "hostname"]), capture_output=True, text=True, env=runs.slurm.env())
    assert (shown.stdout.strip(), shown.stderr) == (some.runs[1].poll().hosts[0], "")
    some.go(0, 1)
    assert [run.ended().phase for run in some.runs] == [Phase.SUCCEEDED] * 2


def test_an_array_that_was_cut_off_is_found_and_repeating_it_submits_only_what_is_missing(runs, tmp_path) -> None:
    some = Several(runs, 3, script=OK)
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "sacct", "scancel", "scontrol", "srun"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    cut = tmp_path / "bin" / "sbatch"
    cut.write_text('#!/bin/sh\n/usr/bin/sbatch "$@" >/dev/null && kill -9 $$\n')
    cut.chmod(0o755)
    backend = SlurmBackend(
        runs.cluster.model_copy(update={"options": {**runs.cluster.options, "bin": str(cut.parent)}})
    )
    with pytest.raises(AmbiguousSubmit):
        backend.submit_array(some.plans[:2], {})
    found = [some.backend.find(plan.marker) for plan in some.plans]
    assert [handle is None for handle in found] == [False, False, True]
    handles = some.submit()
    assert handles[:2] == found[:2]
    assert handles[2].native_id.endswith("_0")
    assert handles[2].group != handles[0].group
    assert [run.ended().phase for run in some.runs] == [Phase.SUCCEEDED] * 3
    assert some.submit()[2].native_id == handles[2].native_id  # again does nothing


def test_two_arrays_of_the_same_attempts_become_one(runs) -> None:
    some = Several(runs, 2)
    handles = some.submit()
    directory = Path(str(submission.array_dir(some.backend.layout, handles[0].group)))
    options = submission.array_options(handles[0].group, 2, None, str(directory))
    second = runs.slurm.run("sbatch", "--parsable", *options, f"{directory}/array.sbatch")
    assert [some.backend.find(plan.marker).native_id for plan in some.plans] == [h.native_id for h in handles]
    eventually(lambda: "RUNNING" not in runs.slurm.run("squeue", "-h", "-r", "-o", "%T", f"--jobs={second}"))
    some.go(0, 1)
    assert [run.ended().phase for run in some.runs] == [Phase.SUCCEEDED] * 2
    assert [run.log(0).split()[0] for run in some.runs] == ["up"] * 2


def test_what_slurm_refuses_leaves_no_element_and_no_secret(runs) -> None:
    some = Several(runs, 2, secrets={"TOKEN": "s3cret"}, resources={"options": {"slurm": {"partition": "nope"}}})
    with pytest.raises(BackendError, match="invalid partition specified: nope"):
        some.submit()
    assert [some.backend.find(plan.marker) for plan in some.plans] == [None, None]
    assert not any((run.directory / "secrets.json").exists() for run in some.runs)
