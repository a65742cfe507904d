"""`orc diff`, `orc tag`, `orc cost`: what differs, what is noted, what it has cost."""

from __future__ import annotations

import pytest

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
