"""Habits from other tools: their verbs, filters, forms of output, and what is meant when nothing is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from orc.orchestrator.cli.commands import jobs as listing
from orc.orchestrator.cli.foreign_verbs import HINTS
from orc.orchestrator.cli.main import COMMANDS
from orc.orchestrator.cli.ui import display
from orc.orchestrator.views import JobRow

from ..conftest import HELLO, Run

JobFile = Callable[..., str]


def test_verbs_of_other_tools_are_answered_and_do_nothing(orc: Run, orc_home: Path) -> None:
    assert not HINTS.keys() & COMMANDS.keys()
    for verb, answer in {
        "ps": "`orc list`",
        "kill": "`orc cancel JOB`",
        "squeue": "`orc list`",
        "sbatch": "`orc submit",
    }.items():
        result = orc(verb, "x")
        assert result.code == 2
        assert f"no such command {verb!r}; " in result.err
        assert answer in result.err
    for typed in ("prun", "gcc", "cancl-all"):  # nothing that deletes is ever suggested
        assert "prune" not in orc(typed).err
        assert "'gc'" not in orc(typed).err
    assert "did you mean 'status'?" in orc("statu").err
    assert not orc_home.exists()


def test_without_names_the_newest_job_and_the_job_file_here_are_meant(
    orc: Run, job_file: JobFile, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert orc("submit").code == 2
    assert "there is no job.yaml in the current directory" in orc("render").err
    path = job_file(HELLO + "tags: {team: vision}\n")
    monkeypatch.chdir(place / "job")
    rendered = orc("render", "--json").json
    assert orc("submit", "--dry-run", "--json").json == rendered == orc("render", path, "--json").json
    assert orc("list", "-o", "name").out == ""
    job = orc("submit", "--follow", "--json").json
    assert orc("wait", "-o", "name").out == f"{job['id']}\n" == orc("list", "-o", "name").out
    assert "hello from 0" in orc("logs").out
    assert orc("events", "--json").json["events"][0]["job"] == job["id"]
    assert orc("metrics").err.startswith("error: the job has measured nothing so far")
    assert orc("cancel").code == 2  # never without a name

    listed = orc("list", "--json").json
    assert yaml.safe_load(orc("list", "-o", "yaml").out) == listed
    assert yaml.safe_load(orc("status", job["id"], "-o", "yaml").out) == {"jobs": [job]}
    (row,) = listed["jobs"]
    assert row["created_at_iso"].endswith("Z")
    assert list(row)[list(row).index("created_at") + 1] == "created_at_iso"
    assert "team=vision" in orc("list", "-o", "wide").out
    assert orc("list", "-o", "x").code == 2

    again = orc("resubmit", job["id"], "--follow", "--json").json
    assert _types(again) == _types(job)


def _types(value: object) -> object:
    """Return the shape of *value*: keys and types."""
    if isinstance(value, dict):  # a short job may end before its cluster was asked: nothing has been seen of it then
        return {
            key: "" if key in ("seen_at", "seen_at_iso") else _types(item)
            for key, item in value.items()
            if key != "source"
        }
    return [_types(item) for item in value] if isinstance(value, list) else type(value).__name__


SLEEPER = "{name: %s, command: [sleep, '60'], launcher: python, tags: {sweep: %s}}"


def test_cancel_takes_filters_shows_what_it_will_stop_and_wants_a_yes(
    orc: Run, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [orc("submit", job_file(SLEEPER % (name, sweep)), "--json").json["id"] for name, sweep in ("aa", "bb", "bc")]
    refused = orc("cancel", "--tag", "sweep=b")
    assert refused.code == 2
    assert "--yes is needed to cancel 1 job where orc cannot ask" in refused.err
    assert ids[1] in refused.err
    assert ids[0] not in refused.err
    monkeypatch.setattr(display, "can_ask", lambda: True)
    monkeypatch.setattr(display, "confirm", lambda question: False)
    assert orc("cancel", "--name", "b").code == 2
    assert orc("cancel", ids[0], "--name", "b").code == 2
    states = {row["id"]: row["state"] for row in orc("list", "--json").json["jobs"]}
    assert "CANCELLED" not in states.values()
    assert orc("cancel", "--name", "b", "--tag", "sweep=c", "--yes", "-o", "name").out == f"{ids[2]}\n"
    assert orc("cancel", "--tag", "sweep=nothing", "--yes", "--json").json == {"jobs": []}
    assert orc("cancel", "--state", "running", "--state", "pending", "--yes", "--grace", "0").code == 0
    assert orc("wait", *ids, "--timeout", "60").code == 3


def test_a_large_snapshot_is_refused_before_it_is_read_unless_it_is_meant(
    orc: Run, job_file: JobFile, place: Path
) -> None:
    path = job_file(HELLO + "workdir: {limit: 1M}\n")
    for name, size in {"data/raw/a": 900_000, "data/raw/b": 900_000, "runs/x": 300_000, "src/y": 10, "z/q": 1}.items():
        file = place / "job" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            out.truncate(size)
    (place / "job" / "data" / "raw" / "a").chmod(0)  # who reads it fails
    error = orc("submit", path, "--json").error
    assert error["what"].startswith("the snapshot would hold 2.1 MB in 6 files, more than 1.0 MB")
    assert error["where"] == "largest folders: data/raw (1.8 MB), runs (300.0 kB), src (10 B)"
    assert ".orcignore" in error["do"]
    assert "--yes" in error["do"]
    assert orc("list", "--json").json == {"jobs": []}
    (place / "job" / ".orcignore").write_text("data/\n")
    assert orc("submit", path, "--follow").code == 0
    (place / "job" / ".orcignore").unlink()
    (place / "job" / "data" / "raw" / "a").chmod(0o600)
    assert orc("submit", path, "--yes", "--follow").code == 0


def test_a_watched_list_lays_out_what_the_terminal_has_room_for() -> None:
    rows = [JobRow(f"a-{i}", "n", "local", "local", "RUNNING", "", 1, 0.0, 0.0, 1.0, (), {}, None) for i in range(9999)]
    lines = listing.fitting(rows, False, height=24).splitlines()
    assert [line.split()[0] for line in lines] == ["JOB", *(f"a-{i}" for i in range(22)), "..."]
    assert "and 9,977 more" in lines[-1]
    assert len(listing.fitting(rows[:22], False, height=24).splitlines()) == 23


def test_a_watched_list_prints_what_has_changed(
    orc: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def row(job: str, state: str) -> JobRow:
        return JobRow(job, "n", "local", "local", state, "", 1, 0.0, 0.0, 1.0, (), {}, None)

    later = iter(
        [
            [row("a-1", "RUNNING")],
            [row("a-1", "RUNNING"), row("b-2", "RUNNING")],
            [row("a-1", "RUNNING"), row("b-2", "FAILED")],
        ]
    )
    monkeypatch.setattr(listing, "WATCH_INTERVAL_S", 0)
    with pytest.raises(StopIteration):
        listing.watch(lambda: next(later), wide=False)
    shown = [line.split()[:2] for line in capfd.readouterr().out.splitlines()]
    assert shown == [["JOB", "STATE"], ["a-1", "RUNNING"], ["b-2", "RUNNING"], ["b-2", "FAILED"]]
    assert orc("list", "-w", "--json").code == 2
