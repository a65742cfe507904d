from __future__ import annotations

import pytest


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
