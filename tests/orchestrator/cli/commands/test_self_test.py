"""`orc test` and `orc env`: what they check and say, here and on a cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orc.launchers.paths import clusters_file

CHECKS = ["start", "state", "data", "collectives", "training", "save and load"]


def test_this_machine_and_a_cluster_are_tested_on_two_ranks(orc, place: Path) -> None:
    config = place / "config.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    here = orc("test", "--config_file", str(config), "--json")
    assert here.code == 0, here
    there = orc("test", "--cluster", "local", "--nodes", "2", "-n", "1", "--cpu", "--json")
    assert there.code == 0, there
    for result, cluster in ((here.json, None), (there.json, "local")):
        assert (result["ok"], result["processes"], result["exit_status"], result["cluster"]) == (True, 2, 0, cluster)
        assert [check["check"] for check in result["checks"]] == CHECKS
        assert all(check["ok"] and check["seconds"] >= 0 and check["what"] for check in result["checks"])
    assert "2 processes on 2 nodes" in there.json["checks"][1]["what"]
    assert orc("test", "--nodes", "2").code == 2


def test_env_says_what_an_issue_needs_and_no_secret(orc, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORC_LEDGER_URL_PASSWORD", "s3cret")
    monkeypatch.setenv("ORC_DEBUG_MODE", "s3cret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = place / "hf" / "accelerate"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(place / "hf"))
    (folder / "default_config.yaml").write_text("num_processes: 4\nmixed_precision: bf16\n")
    done = orc("env", "--json")
    facts = done.json
    assert facts["packages"]["orc-launch"]
    assert facts["torch"]["version"] == facts["packages"]["torch"]
    assert facts["torch"]["cuda_available"] is False
    assert "gloo" in facts["torch"]["backends"]
    assert {"name": "local", "kind": "local"} in facts["clusters"]
    assert facts["accelerate_config"]["values"] == {"num_processes": 4, "mixed_precision": "bf16"}
    assert facts["variables"]["ORC_DEBUG_MODE"] == "(set)"
    assert "s3cret" not in done.out
    other = place / "other.yaml"
    told = "distributed_type: TPU\nnum_processes: 3\ntpu_use_sudo: true\n"
    other.write_text(
        f"{told}commands: [export TOKEN=s3cret]\ntpu_env: [KEY=s3cret]\nmain_process_ip: s3cret.internal\n"
    )
    clusters_file().parent.mkdir(parents=True, exist_ok=True)
    clusters_file().write_text("a: {kind: local}\nb: {kind: nothing}\n")
    text = orc("env", "--config_file", str(other)).out
    assert re.search(r"^- clusters: local \(local\), a \(local\), b \(error: .*nothing", text, re.MULTILINE)
    for line in (
        "num_processes: 3",
        "distributed_type: TPU",
        "tpu_use_sudo: True",
        "tpu_env: (set)",
        "commands: (set)",
    ):
        assert f"    - {line}\n" in text
    assert f"- Python: {facts['python']['version']}" in text
    assert "s3cret" not in text
    assert json.loads(json.dumps(facts)) == facts
