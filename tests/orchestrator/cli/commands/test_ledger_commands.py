"""`orc export`, `orc import` and `orc prune --jobs-older-than`, as docs/explanation/ledger.md shows them."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import Ledger

PAGE = Path(__file__).parents[4] / "docs" / "explanation" / "ledger.md"
DAY = 86400.0


@pytest.fixture
def url(tmp_path, monkeypatch, orc_home):
    """A ledger of four jobs: of 40 and 50 days (failed) ago, of yesterday, and one that has just been submitted."""
    url = f"sqlite:///{tmp_path}/first.db"
    ledger = Ledger(open_database(tmp_path, url), time.time)
    for name, days, end in (
        ("old", 40, Kind.JOB_CANCELLED),
        ("broken", 50, Kind.JOB_FAILED),
        ("fresh", 1, Kind.JOB_CANCELLED),
        ("live", 0, None),
    ):
        with ledger.transaction() as tx:
            tx.now -= days * DAY
            job = tx.enqueue(NewJob(name, "digits", "nowhere", "fake", "", {}, {}, {}))
            if end is not None:
                tx.record(job, Event(end), job_set={"ended_at": tx.now})
    ledger.close()
    monkeypatch.setenv("ORC_LEDGER_URL", url)
    monkeypatch.setattr("orc.orchestrator.api.session.LedgerSession.leave_reconciler", lambda client: None)
    return url


def ids(orc):
    return {job["id"] for job in orc("list", "--json").json["jobs"]}


def test_a_ledger_is_exported_and_imported(orc, url, tmp_path, monkeypatch, place):
    assert orc("export", "ledger.jsonl").out == "wrote 4 jobs with 7 events into ledger.jsonl\n"
    file = place / "ledger.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600
    refused = orc("export", "ledger.jsonl", "--json")
    assert refused.code != 0
    assert "--force" in str(refused.error)
    assert orc("export", "ledger.jsonl", "--force", "--json").json["rows"]["jobs"] == 4
    assert orc("export", "-").out.splitlines()[1:] == file.read_text().splitlines()[1:]
    monkeypatch.setenv("ORC_LEDGER_URL", f"sqlite:///{tmp_path}/other.db")
    assert orc("import", "ledger.jsonl").out == (
        "added 4 jobs with 7 events\n1 jobs had not ended: here they are cancelled, and do not run\n"
    )
    again = orc("import", "ledger.jsonl", "--json").json
    assert (again["added"]["jobs"], again["known"]["jobs"]) == (0, 4)
    assert orc("import", "ledger.jsonl").out == "added 0 jobs with 0 events\n4 jobs were here already\n"
    (place / "x.jsonl").write_bytes(b"\xff\xfe")
    for name in ("x.jsonl", "missing.jsonl"):
        failed = orc("import", name)
        assert failed.code != 0
        assert name in failed.err
    assert orc("export", "no/where.jsonl").code != 0
    assert sorted(path.name for path in place.iterdir()) == ["ledger.jsonl", "x.jsonl"]


def test_the_live_jobs_of_a_file_run_only_after_they_were_shown(orc, url, tmp_path, monkeypatch, place):
    assert orc("export", "ledger.jsonl").code == 0
    hostile = place / "hostile.jsonl"
    text = (place / "ledger.jsonl").read_text()
    spec = json.dumps(json.dumps({"command": "touch x\x1b[2J"}))
    hostile.write_text(text.replace('"spec":"{}"', f'"spec":{spec}'))
    monkeypatch.setenv("ORC_LEDGER_URL", f"sqlite:///{tmp_path}/other.db")
    asked = orc("import", "hostile.jsonl", "--take-over")
    assert asked.code == 2
    assert "job live  QUEUED  of " in asked.err
    assert "runs command touch x\\x1b[2J" in asked.err
    assert "--yes is needed to go on with these 1 here" in asked.err
    assert ids(orc) == set()
    assert orc("import", "hostile.jsonl", "--yes").code == 2
    assert orc("import", "ledger.jsonl", "--take-over", "--yes").out == "added 4 jobs with 7 events\n"
    states = {job["id"]: job["state"] for job in orc("list", "--json").json["jobs"]}
    assert states["live"] == "QUEUED"


def test_old_jobs_are_removed_from_the_ledger(orc, url):
    dry = orc("prune", "--jobs-older-than", "30d", "--dry-run", "--json").json
    assert dry == {"dry_run": True, "jobs": 2, "events": 4}
    assert orc("prune", "--jobs-older-than", "30d", "--cluster", "other").out == "removed 0 jobs with 0 events\n"
    assert orc("prune", "--jobs-older-than", "30d", "--keep-failed").out == "removed 1 jobs with 2 events\n"
    assert ids(orc) == {"broken", "fresh", "live"}
    assert orc("prune", "--jobs-older-than", "30d").out == "removed 1 jobs with 2 events\n"
    assert ids(orc) == {"fresh", "live"}
    audit = ["--audit-older-than", "365d"]
    assert orc("prune", *audit, "--dry-run", "--json").json == {"dry_run": True, "lines": 0}
    assert orc("prune", *audit).out == "removed 0 lines of the audit log\n"
    many = ["--jobs-older-than", "30d"]
    for wrong in (["--keep-failed"], [*many, "--kept"], ["--jobs-older-than", "soon"], [*many, *audit]):
        assert orc("prune", *wrong).code == 2


def test_the_commands_of_the_documentation_work(orc, url, tmp_path, monkeypatch):
    lines = [
        line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) for line in block.splitlines()
    ]
    assert len(lines) == 4
    for line in lines:
        if "import" in line:
            monkeypatch.setenv("ORC_LEDGER_URL", f"sqlite:///{tmp_path}/team.db")
        done = orc(*shlex.split(line)[1:])
        assert done.code == 0, done.err
    assert ids(orc) == {"broken", "fresh", "live"}
