"""`orc diff`, `orc tag`, `orc cost`, `orc quota`, `orc cancel`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from orc.orchestrator.client import Client

from ..conftest import Run

JOB = """\
name: hello
command: [/bin/sh, -c, 'cat notes.txt']
launcher: python
env: {{LR: "{lr}"}}
"""


@pytest.fixture
def submitted(orc, place):
    def submit(lr: str, notes: str) -> str:
        folder = place / "job"
        folder.mkdir(exist_ok=True)
        (folder / "notes.txt").write_text(notes)
        (folder / "job.yaml").write_text(JOB.format(lr=lr))
        assert orc("submit", str(folder / "job.yaml")).code == 0
        orc("wait")
        return str(orc("list", "--json").json["jobs"][0]["id"])

    return submit


def test_two_jobs_are_compared_by_specification_code_and_outcome(orc, submitted):
    a = submitted("0.1", "one\nsame\n")
    b = submitted("0.2", "two\nsame\n\x1b[2J")
    found = orc("diff", a, b, "--json").json
    assert {entry["key"]: (entry["a"], entry["b"]) for entry in found["environment"]} == {"env.LR": ("0.1", "0.2")}
    assert found["spec"] == []
    (notes, job) = sorted(found["code"]["files"], key=lambda file: file["path"] == "job.yaml")
    assert (notes["path"], notes["change"]) == ("notes.txt", "changed")
    assert "-one\n+two\n same\n" in notes["diff"]
    assert job["path"] == "job.yaml"
    assert [side["state"] for side in found["outcome"]] == ["SUCCEEDED", "SUCCEEDED"]
    text = orc("diff", a, b)
    assert "+two" in text.out
    assert "\x1b" not in text.out
    assert "-one" not in orc("diff", a, b, "--stat").out
    same = orc("diff", a, a).out
    assert same.count("the same") == 3


def test_tags_are_set_and_removed(orc, submitted):
    job = submitted("0.1", "x")
    assert orc("tag", job, "team=vision", "draft=yes").out == "draft=yes\nteam=vision\n"
    assert orc("tag", job, "draft-", "team=a=b", "--json").json == {"id": job, "tags": {"team": "a=b"}}
    assert [row["id"] for row in orc("list", "--tag", "team=a=b", "--json").json["jobs"]] == [job]
    assert orc("tag", job, "oops").code == 2


def test_costs_need_a_price_and_are_unknown_without_one(orc, submitted, orc_home, monkeypatch, tmp_path):
    job = submitted("0.1", "x")
    (group,) = orc("cost", "--json").json["groups"]
    assert (group["key"], group["cost"]) == (job, None)
    assert group["unpriced_node_hours"] == group["node_hours"] > 0
    assert "unknown" in orc("cost").out
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text("local:\n  prices: {node_hour: 7200, currency: EUR}\n")
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    total = orc("cost", "--by", "tag:team", "--since", "1h", "--json").json["total"]
    assert total["cost"]["EUR"] == pytest.approx(7200 * total["node_hours"], rel=1e-3)
    assert orc("cost", "--until", "2020-01-01", "--json").json["groups"] == []
    assert orc("cost", "--by", "month").code != 0


RANKS = """\
name: ranks
command:
  - /bin/sh
  - -c
  - 'echo "2026-01-01T00:00:0$RANK first of $RANK"; echo "2026-01-01T00:00:1$RANK second of $RANK"'
launcher: python
resources: {procs_per_node: 2}
"""


def test_logs_of_ranks_are_merged_by_time_and_searched(orc, job_file):
    assert orc("submit", job_file(RANKS)).code == 0
    orc("wait")
    words = [line.split(" ", 3)[3] for line in orc("logs").out.splitlines()]
    assert words == ["first of 0", "first of 1", "second of 0", "second of 1"]
    assert orc("logs", "--grep", "second of [1]").out == "[rank 1] 2026-01-01T00:00:11 second of 1\n"
    assert orc("logs", "--rank", "0", "--since", "2026-01-01T00:00:05").out == "2026-01-01T00:00:10 second of 0\n"
    assert "\x1b[" in orc("logs", "--color").out
    assert orc("logs", "--grep", "(").code == 2


def test_a_quota_is_set_listed_with_what_is_in_flight_and_removed(orc, job_file):
    assert orc("quota", "set", "--project", "vision", "gpus", "16").out == "project vision: 16 gpus\n"
    assert orc("quota", "set", "--project", "vision", "gpus", "8").code == 0
    assert orc("quota", "set", "--user", "nobody", "jobs", "0", "--json").json == {
        "scope": "user",
        "name": "nobody",
        "resource": "jobs",
        "amount": 0.0,
    }
    found = orc("quota", "list", "--json").json["quotas"]
    assert [(q["name"], q["amount"], q["used"]) for q in found] == [("vision", 8.0, 0), ("nobody", 0.0, 0)]
    assert "SCOPE" in orc("quota", "list").out
    assert orc("quota", "remove", "--user", "nobody", "jobs").code == 0
    refused = orc("quota", "remove", "--user", "nobody", "jobs", "--json")
    assert "no quota of jobs" in refused.error["what"]
    assert len(orc("quota", "list", "--json").json["quotas"]) == 1


@pytest.mark.parametrize("named", [[], ["--user", "ada", "--project", "vision"]])
def test_whose_it_is_has_to_be_said(orc, named):
    assert "--user NAME or --project NAME" in orc("quota", "set", *named, "gpus", "1").err


def test_a_job_waits_for_its_quota_and_is_counted(orc, job_file):
    path = job_file("name: hello\ncommand: 'true'\nlauncher: python\nproject: vision\n")
    assert orc("quota", "set", "--project", "vision", "jobs", "0").code == 0
    job = orc("submit", path, "--priority", "7", "--no-reconciler", "--json").json
    assert (job["state"], job["spec"]["priority"]) == ("QUEUED", 7)
    assert job["reason"] == "waiting for ever: it needs 1 of the 0 jobs of the project vision"
    assert orc("quota", "remove", "--project", "vision", "jobs").code == 0
    assert orc("wait", job["id"]).code == 0


def test_a_job_whose_cluster_is_silent_is_not_called_asked(orc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(name: str, cluster: str) -> SimpleNamespace:
        return SimpleNamespace(
            id=name, state="RUNNING", cluster=cluster, ended=False, reason="", attempts=[], to_dict=dict
        )

    def cancel(_client: Client, ids, *, grace_s, on_unreachable):
        on_unreachable({"hpc": "scancel did not answer within 30 s"})
        return [job("far", "hpc"), job("near", "local")]

    monkeypatch.setattr(Client, "resolve", lambda self, given: given)
    monkeypatch.setattr(Client, "cancel", cancel)
    shown = orc("cancel", "far", "near")
    assert shown.out.splitlines() == [
        "far  RUNNING  to be stopped, not told yet; `orc wait` waits for the end",
        "near  RUNNING  asked to stop; `orc wait` waits for the end",
    ]
    assert "scancel did not answer within 30 s" in shown.err
    assert "the wish is kept" in shown.err
