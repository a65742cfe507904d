"""`orc doctor`, `orc clusters`, `orc completion`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sagemaker_testbed import SagemakerTestbed

from orc.orchestrator.cli.commands import doctor

from ..conftest import Run

JobFile = Callable[..., str]


def _levels(run: Run, *arguments: str) -> dict[str, str]:
    return {check["name"]: check["level"] for check in run("doctor", *arguments, "--json").json["checks"]}


def test_the_doctor_finds_a_working_machine_well(orc: Run, job_file: JobFile) -> None:
    assert orc("submit", job_file(), "--follow").code == 0
    result = orc("doctor", "--deep", "--json")
    assert result.code == 0
    assert result.json["ok"] is True
    names = {check["name"] for check in result.json["checks"]}
    assert {"python", "torch", "git", "slurm", "state directory", "ledger", "snapshots", "cluster local"} <= names
    assert all(check["what"] for check in result.json["checks"])
    text = orc("doctor", "--all")
    assert text.code == 0
    assert "jobs: 1, under way: 0" in text.out


def test_the_doctor_says_in_a_line_of_each_kind_what_works_here(
    orc: Run, orc_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda module: module in ("torch", "fabric"))
    monkeypatch.setattr(shutil, "which", lambda program: None)
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text("lab: {kind: ssh, options: {hosts: [a]}}\n")
    monkeypatch.setattr(doctor, "checks", lambda deep: iter([doctor.Check("python", "ok", "3.11")]))
    header, *lines = orc("doctor").out.splitlines()
    assert header.split() == ["KIND", "HERE", "CLUSTERS"]
    assert [line.split()[:2] for line in lines[:6]] == [
        ["kubernetes", "missing"],
        ["local", "works"], ["sagemaker", "missing"], ["slurm", "works"], ["ssh", "works"], ["tpu", "missing"],
    ]  # fmt: skip
    assert "pip install 'orc-launch[k8s]'" in lines[0]
    assert "pip install 'orc-launch[aws]'" in lines[2]
    assert "orc clusters discover slurm --login HOST" in lines[3]
    assert "lab; `orc clusters check lab`" in lines[4]
    assert lines[6:] == ["", "1 check, nothing wrong; `orc doctor --all` shows each"]


@pytest.mark.parametrize(
    ("clusters", "installed", "kind", "said"),
    [
        ("{}", "google.cloud.tpu_v2", "tpu", (False, "fabric is not installed here: pip install 'orc-launch[ssh]'")),
        (
            "{}",
            "",
            "tpu",
            (False, "google.cloud.tpu_v2, fabric are not installed here: pip install 'orc-launch[gcp,ssh]'"),
        ),
        ("a: {kind: slurm, options: {login: x}}", "", "slurm", (False, "fabric is not installed here: pip install")),
        ("a: {kind: slurm, options: {login: x}}", "fabric", "slurm", (True, "a; `orc clusters check a` asks it")),
        ("{a: {kind: slurm, options: {login: x}}, b: {kind: slurm}}", "", "slurm", (True, "a, b; `orc clusters")),
        ("a: {kind: ssh, rot: /orc}", "fabric", "ssh", (True, "clusters.yaml has mistakes: see below")),
        ("[]", "fabric", "ssh", (True, "clusters.yaml has mistakes: see below")),
    ],
)
def test_the_doctor_knows_what_each_kind_and_its_entries_need(
    orc_home: Path, monkeypatch: pytest.MonkeyPatch, clusters: str, installed: str, kind: str, said: tuple[bool, str]
) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda module: module in ("torch", installed))
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text(clusters)
    line = next(line for line in doctor.kinds() if line.kind == kind)
    assert (line.works, said[1] in line.what) == (said[0], True), line


def test_the_doctor_counts_snapshots_of_no_job(orc: Run, job_file: JobFile) -> None:
    assert orc("submit", job_file("name: x\ncommand: 'true'\nsecrets: [NOT_SET]\n")).code == 2
    assert "2 in " in orc("doctor", "--all").out
    assert ", 2 of no job" in orc("doctor", "--all").out
    assert orc("submit", job_file("name: x\ncommand: 'true'\nlauncher: python\n"), "--follow").code == 0
    assert ", 1 of no job" in orc("doctor", "--all").out


def test_the_doctor_does_not_import_torch(place: Path) -> None:
    code = (
        "import sys\nfrom orc.orchestrator.cli.main import main\nmain(['doctor'])\nsys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_the_doctor_sees_a_damaged_snapshot_when_it_looks_deep(orc: Run, orc_home: Path, job_file: JobFile) -> None:
    orc("submit", job_file(), "--follow")
    (victim,) = (orc_home / "state" / "store" / "trees").glob("*/job.yaml")
    victim.chmod(0o644)
    victim.write_text("something else")
    assert _levels(orc)["snapshots"] == "ok"
    assert orc("doctor", "--deep").code == 1
    assert _levels(orc, "--deep")["snapshots"] == "error"


def test_the_doctor_names_a_damaged_ledger_and_goes_on(orc: Run, orc_home: Path) -> None:
    (orc_home / "state").mkdir(mode=0o700, parents=True)
    (orc_home / "state" / "ledger.db").write_bytes(b"rubbish" * 1000)
    assert orc("doctor").code == 1
    levels = _levels(orc)
    assert levels["ledger"] == "error"
    assert levels["cluster local"] == "ok"


def test_the_doctor_names_a_state_directory_that_others_can_read(orc: Run, orc_home: Path) -> None:
    (orc_home / "state").mkdir(mode=0o755, parents=True)
    result = orc("doctor")
    assert result.code == 0
    assert "chmod 700" in result.out


def test_the_doctor_names_a_broken_clusters_file(orc: Run, orc_home: Path) -> None:
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text("a: {kind: slrum}\nb: [\n")
    result = orc("doctor")
    assert result.code == 1
    assert "clusters.yaml" in result.out


def test_clusters_are_listed_shown_and_checked(orc: Run, orc_home: Path, place: Path) -> None:
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text(f"here: {{kind: local, root: {place}/root, env: {{A: '1'}}}}\n")
    listed = orc("clusters", "--json").json
    assert listed == orc("clusters", "list", "--json").json
    assert [cluster["name"] for cluster in listed["clusters"]] == ["local", "here"]
    assert "here" in orc("clusters").out
    shown = orc("clusters", "show", "here", "--json").json
    assert (shown["kind"], shown["root"], shown["env"]) == ("local", f"{place}/root", {"A": "1"})
    assert orc("clusters", "--json", "show", "here").json == shown
    assert "kind: local" in orc("clusters", "show", "here").out
    checked = orc("clusters", "check", "here", "--json")
    assert checked.code == 0
    assert checked.json["cluster"] == "here"
    assert orc("clusters", "check", "local").code == 0


def test_the_check_names_no_launcher_to_a_cluster_that_has_its_own(
    orc: Run, orc_home: Path, sagemaker: SagemakerTestbed
) -> None:
    options = sagemaker.options(instance_type="ml.p4d.24xlarge", distributed_type="DATA_PARALLEL")
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text(json.dumps({"sm": {"kind": "sagemaker", "options": options}}))
    checked = orc("clusters", "check", "sm", "--json")
    assert checked.code == 0, checked.out
    assert checked.json["findings"] == []  # none says that a launcher does not fit


def test_one_bad_entry_says_nothing_about_the_other_clusters(orc: Run, orc_home: Path) -> None:
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text(
        "here: {kind: local}\nodd: {kind: slumr}\npod: {kind: tpu, options: {zones: a}}\n"
    )
    assert orc("clusters", "show", "here").code == 0
    listed = orc("clusters")
    assert listed.code == 1
    assert [line.split()[0] for line in listed.out.splitlines()[1:4]] == ["local", "here", "pod"]
    assert "odd: odd.kind: unknown kind 'slumr'" in listed.err
    assert f"{orc_home}/config/clusters.yaml:2:13" in listed.err
    assert list(orc("clusters", "--json").json["errors"]) == ["odd"]
    shown = orc("clusters", "show", "odd")
    assert shown.code == 2
    assert "unknown kind 'slumr'" in shown.err
    for command in ("prune", "queue"):
        done = orc(command)
        assert done.code == 1, done.err
        assert "unknown kind 'slumr'" in done.err
        assert "project" in done.err
    looked = orc("doctor", "--all").out
    assert "cluster here" in looked
    assert "unknown kind 'slumr'" in looked


def test_an_unknown_cluster_is_refused_with_the_known_ones(orc: Run) -> None:
    for command in ("show", "check"):
        result = orc("clusters", command, "locale")
        assert result.code == 2
        assert "local" in result.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_those_of_the_shell(shell: str, orc: Run) -> None:
    result = orc("completion", shell)
    assert result.code == 0
    assert "_ORC_COMPLETE" in result.out
    assert orc("completion", shell, "--json").json["script"] in result.out


def test_completion_works_in_a_real_bash(orc: Run, place: Path) -> None:
    script = orc("completion", "bash").out
    words = 'COMP_WORDS=(orc init dig); COMP_CWORD=2; _orc_completion orc; echo "${COMPREPLY[@]}"'
    folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{words}"],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "digits", done.stderr


def test_an_unknown_shell_is_refused(orc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert orc("completion").code == 2
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert "compdef" in orc("completion").out


def test_jobs_that_the_ledger_has_lost_are_named_by_doctor_and_adopted(orc: Run, job_file, orc_home: Path) -> None:
    job = orc("submit", job_file(), "--follow").err.partition("submitted ")[2].split()[0]
    (orc_home / "state" / "ledger.db").unlink()
    (found,) = [check for check in orc("doctor", "--json").json["checks"] if job in check["what"]]
    assert (found["level"], found["do"]) == ("warning", "orc adopt")
    assert orc("list").err.endswith("the ledger does not know: 1; `orc adopt` restores them\n")
    assert "not in the ledger" in orc("adopt", "--dry-run").out
    assert "adopted, attempts: 1" in orc("adopt").out
    assert orc("status", job, "--json").json["jobs"][0]["state"] == "SUCCEEDED"
    assert "knows every job" in orc("adopt").out


def test_an_unreachable_slurm_controller_is_status_5_and_a_failed_job(
    orc: Run, job_file: JobFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real sbatch, squeue and so on, pointed at a controller that is not there."""
    if not shutil.which("sbatch"):
        pytest.skip("Slurm's programs are not installed (apt install slurm-client)")
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=nowhere\nSlurmctldHost=localhost\nSlurmctldPort=1\nSlurmdPort=1\nAuthType=auth/none\n"
        "CredType=cred/none\nMessageTimeout=1\nSlurmctldTimeout=1\n"
        "NodeName=localhost State=UNKNOWN\nPartitionName=all Nodes=ALL Default=YES State=UP\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(conf))
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(f"down: {{kind: slurm, root: {tmp_path / 'shared'}}}\n")
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    assert orc("render", job_file(), "--cluster", "down").code == 0
    result = orc("submit", job_file(), "--cluster", "down")
    assert result.code == 5, result.err
    assert result.err.count("error: ") == 1
    assert [job["state"] for job in orc("list", "--json").json["jobs"]] == ["FAILED"]
    checked = orc("clusters", "check", "down", "--json")
    assert checked.code == 1
    assert checked.json["findings"][0]["level"] == "error"
