"""The starters do what they promise, through the same commands that a user types."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import yaml

from orc.orchestrator.cli.commands.init import GROUPS, group, starters
from orc.orchestrator.cli.main import main

ROOT = Path(__file__).parents[2]
EXPECTED = re.compile(r"^Expected: (.+?) (>=|<=|=) (\S+)$", re.MULTILINE)
PLATFORMS = [
    ("kubernetes", "podFailurePolicy"),
    ("sagemaker", "CreateTrainingJob"),
    ("slurm", "#SBATCH --partition=gpu"),
    ("ssh", "gpu01"),
    ("tpu", "v4-32"),
]
ORC = [sys.executable, "-m", "orc.orchestrator.cli.main"]


def _orc(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ORC, *arguments], cwd=cwd, capture_output=True, text=True, timeout=170)


def _start(name: str, folder: Path) -> Path:
    assert _orc("init", name, cwd=folder).returncode == 0
    return folder / name


def test_hello_says_hello_from_both_ranks(tmp_path: Path) -> None:
    done = _orc("submit", "job.yaml", "--follow", "--all-ranks", cwd=_start("hello", tmp_path))
    assert done.returncode == 0, done.stderr
    greetings = {line.partition(" on ")[0] for line in done.stdout.splitlines() if "Hello" in line}
    assert greetings == {f"[rank {rank}] Hello from rank {rank} of 2" for rank in (0, 1)}


@pytest.mark.slow
@pytest.mark.distributed
def test_digits_reaches_95_percent_and_keeps_verified_checkpoints(tmp_path: Path) -> None:
    done = _orc("submit", "job.yaml", "--follow", cwd=_start("digits", tmp_path))
    assert done.returncode == 0, done.stderr
    epochs = re.findall(r"^epoch +(\d+)/12  loss (\d\.\d+)  accuracy (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert [int(epoch) for epoch, _, _ in epochs] == list(range(1, 13))
    assert float(epochs[-1][1]) < float(epochs[0][1])
    (accuracy,) = re.findall(r"^test accuracy (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) >= 0.95
    (job,) = json.loads(_orc("list", "--json", cwd=tmp_path).stdout)["jobs"]
    assert job["state"] == "SUCCEEDED"


@pytest.mark.distributed
def test_the_number_of_batches_per_step_comes_from_the_job_file(tmp_path: Path) -> None:
    folder = _start("gradient-accumulation", tmp_path)
    sets = ("--set", "runtime.gradient_accumulation_steps=2", "--set", "args.epochs=2")
    done = _orc("submit", "job.yaml", "--follow", *sets, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "58 batches per process, 30 optimizer steps" in done.stdout


@pytest.mark.distributed
def test_the_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    shutil.copytree(starters()["notebook"], tmp_path / "notebook")
    notebook = nbformat.read(tmp_path / "notebook/train.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    printed = "".join(output["text"] for output in notebook.cells[-1]["outputs"] if output["name"] == "stdout")
    assert "Launching training on 2" in printed
    (accuracy,) = re.findall(r"^epoch 5: test accuracy (\d\.\d+)$", printed, re.MULTILINE)
    assert float(accuracy) >= 0.93


@pytest.mark.parametrize(("name", "words"), PLATFORMS)
def test_a_job_for_a_platform_can_be_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    shutil.copytree(starters()[name], tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "key.pub").write_text("ssh-ed25519 AAAA me\n")
    clusters = tmp_path / name / "clusters.yaml"
    clusters.write_text(clusters.read_text().replace("~/.ssh/tpu", str(tmp_path / "key")))
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    assert main(["render", str(tmp_path / name / "job.yaml")]) == 0
    assert words in capfd.readouterr().out


def test_the_script_for_hosts_is_the_one_for_slurm() -> None:
    """The other one is run by tests."""
    texts = [(starters()[name] / "train.py").read_text().split('"""', 2)[2] for name in ("ssh", "slurm")]
    assert texts[0] == texts[1]


def test_the_page_of_examples_has_every_starter_and_its_figure() -> None:
    page = (ROOT / "docs/tutorials/examples.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| .+ \| (.+) \|$", page, re.MULTILINE))
    assert list(rows) == list(starters())
    for name, folder in starters().items():
        job = yaml.safe_load((folder / "job.yaml").read_text())
        assert job["name"] == name
        figures = EXPECTED.findall((folder / job["script"]).read_text()) if "script" in job else None
        if figures:
            assert rows[name] == " ".join(figures[0])
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert list(dict.fromkeys(group(folder) for folder in starters().values())) == headings[: len(GROUPS)]


def test_the_text_of_char_gpt_is_long_enough_and_plain() -> None:
    folder = Path(__file__).parents[2] / "templates" / "starters" / "char-gpt"
    text = (folder / "shakespeare.txt").read_text(encoding="ascii")
    assert len(text) > 30_000
    assert "public domain" in (folder / "NOTICE").read_text()
