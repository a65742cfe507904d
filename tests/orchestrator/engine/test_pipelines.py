"""A pipeline on this machine: real jobs, whose files reach those that come after them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orc.launchers.spec.groups import load_jobs
from orc.orchestrator.client import Client
from orc.orchestrator.clients import groups

PIPELINE = """
name: digits
launcher: python
jobs:
  prepare:
    command: mkdir -p "$ORC_OUTPUT_DATA" && echo 1 2 3 > "$ORC_OUTPUT_DATA/train.txt"
    outputs: {data: out/data}
  train:
    cluster: elsewhere
    command: test -e RETRIED || exit 3; wc -w < "$ORC_INPUT_DATA/train.txt" > "$ORC_OUTPUT_MODEL/model.txt"
    setup: ['mkdir -p "$ORC_OUTPUT_MODEL"']
    inputs: {data: prepare.data}
    outputs: {model: checkpoint.dir}
  report:
    command: cat "$ORC_INPUT_MODEL/model.txt" "$ORC_INPUT_DATA/train.txt"
    inputs: {model: train.model, data: prepare.data}
"""


@pytest.fixture
def here(orc_home: Path, tmp_path: Path) -> Iterator[Client]:
    """A client of two clusters with stores of their own."""
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(f"elsewhere: {{kind: local, root: {tmp_path / 'elsewhere'}}}\n")
    with Client(clusters_file=clusters, reconciler=False) as client:
        yield client


def wait(client: Client, view: groups.GroupView) -> groups.GroupView:
    client.wait([member.job.id for member in view.members], timeout_s=240)
    return groups.view(client.workspace, view.id)


def test_files_reach_jobs_on_other_clusters_and_a_failed_pipeline_goes_on(here: Client, tmp_path: Path) -> None:
    path = tmp_path / "project" / "pipeline.yaml"
    path.parent.mkdir()
    path.write_text(PIPELINE)
    failed = wait(here, groups.submit(here.session, load_jobs(path)))
    assert [member.job.state for member in failed.members] == ["SUCCEEDED", "FAILED", "CANCELLED"]
    train = failed.members[1].job
    why = f"{train.id} has failed, and this job runs only after it has succeeded: {train.reason}"
    assert (failed.members[2].job.reason, "exited with 3" in why) == (why, True)

    view = groups.resubmit(here.session, failed.id)
    assert view.members[0].job.id == failed.members[0].job.id  # what has succeeded is not run again
    assert wait(here, view).members[1].job.state == "FAILED"  # the same snapshot has the same mistake

    (path.parent / "RETRIED").touch()
    done = wait(here, groups.submit(here.session, load_jobs(path)))
    assert [member.job.state for member in done.members] == ["SUCCEEDED"] * 3
    report = done.members[2].job.id
    (rank,) = [one for one in here.log_selectors(report) if one.rank == 0]
    assert b"".join(chunk.data for chunk in here.read_log(report, rank)).split() == [b"3", b"1", b"2", b"3"]
    assert (tmp_path / "elsewhere" / "jobs" / done.members[1].job.id / "checkpoints" / "model.txt").is_file()
    digests = here.job(report).digests
    assert set(digests) >= {"input:model", "input:data"}
