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


@pytest.mark.slow
@pytest.mark.distributed
def test_the_trainer_of_transformers_runs_as_it_is(tmp_path: Path) -> None:
    done = _orc("submit", "job.yaml", "--follow", cwd=_start("transformers-trainer", tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ steps on 2 processes$", done.stdout, re.MULTILINE)
    (loss,) = re.findall(r"^eval loss (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert float(loss) <= _expected("transformers-trainer")


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


@pytest.mark.parametrize(("name", "words"), [("sagemaker", "CreateTrainingJob"), ("tpu", "v4-32")])
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


def _expected(name: str) -> float:
    ((_, _, bound),) = EXPECTED.findall((starters()[name] / "train.py").read_text())
    return float(bound)


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


@pytest.mark.slow
@pytest.mark.distributed
def test_digits_goes_on_where_it_was_with_other_processes(tmp_path: Path) -> None:
    folder = _start("digits", tmp_path)
    first = _orc("launch", "-n", "2", "--cpu", "train.py", "--epochs", "2", cwd=folder)
    assert first.returncode == 0, first.stderr
    again = _orc("launch", "--cpu", "train.py", "--epochs", "3", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert re.findall(r"^epoch +(\d+)/", again.stdout, re.MULTILINE) == ["3"]
    assert "in epoch 3" in again.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_digits_goes_on_after_a_checkpoint_with_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    folder = _start("digits", tmp_path)
    batches = -(-1437 // 32)
    first = _orc("launch", "--cpu", "--env", f"ORC_CHECKPOINT_EVERY={batches}", "train.py", "--epochs", "1", cwd=folder)
    assert first.returncode == 0, first.stderr
    shutil.rmtree(folder / "runs" / "checkpoints" / "checkpoint_1")  # the script's own, made after the epoch
    again = _orc("launch", "--cpu", "train.py", "--epochs", "2", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert f"in epoch 1, after step {batches}" in again.stdout
    epochs = re.findall(r"^epoch +(\d+)/2  loss (\S+)  accuracy (\d\.\d+)$", again.stdout, re.MULTILINE)
    assert [(epoch, loss == "nan") for epoch, loss, _ in epochs] == [("1", True), ("2", False)]
    assert epochs[0][2] in first.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_char_gpt_learns_and_writes(tmp_path: Path) -> None:
    sets = ("--set", "args.steps=40", "--set", "checkpoint.every=20")
    done = _orc("submit", "job.yaml", "--follow", *sets, cwd=_start("char-gpt", tmp_path))
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+/40  loss (\d\.\d+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 4.1
    assert "held-out loss" in done.stdout
    assert len(done.stdout.rpartition("held-out loss")[2]) > 250


@pytest.mark.distributed
def test_char_gpt_counts_optimizer_steps_also_when_it_goes_on(tmp_path: Path) -> None:
    folder = _start("char-gpt", tmp_path)
    small = ("--context", "8", "--width", "8", "--heads", "2", "--layers", "1", "--sample", "4")
    launch = ("launch", "--cpu", "--env", "ORC_GRADIENT_ACCUMULATION_STEPS=3", "train.py", *small)
    for steps, resumed in ((4, False), (6, True)):
        done = _orc(*launch, "--steps", str(steps), cwd=folder)
        assert done.returncode == 0, done.stderr
        assert ("after step 4" in done.stdout) is resumed
        newest = max((folder / "runs" / "checkpoints").glob("checkpoint_*"))
        assert json.loads((newest / "manifest.json").read_text())["step"] == steps


@pytest.mark.slow
@pytest.mark.distributed
def test_gpt_fsdp_learns_with_half_of_the_model_on_each_rank_and_goes_on_on_one(tmp_path: Path) -> None:
    folder = _start("gpt-fsdp", tmp_path)
    small = ("--context", "16", "--width", "32", "--heads", "2", "--layers", "2", "--sample", "4")
    fsdp = ("--use-fsdp", "--fsdp-version", "2", "--fsdp-auto-wrap-policy", "1")
    launch = ("launch", "--cpu", *fsdp, "--fsdp-transformer-layer-cls-to-wrap", "Block")
    done = _orc(*launch, "-n", "2", "train.py", *small, "--steps", "40", cwd=folder)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+/40  loss (\d\.\d+)$", done.stdout, re.MULTILINE)]
    assert losses[1] < losses[0] < 4.5
    (share,) = re.findall(r"^kept by this process: .* \((\d+)%\)$", done.stdout, re.MULTILINE)
    assert 48 <= int(share) <= 55
    assert (folder / "runs" / "model" / "model.safetensors").is_file()
    again = _orc(*launch, "train.py", *small, "--steps", "41", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "after step 40" in again.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_gpt_deepspeed_learns_as_replicas_do_and_goes_on(tmp_path: Path) -> None:
    folder = _start("gpt-deepspeed", tmp_path)
    small = ("--context", "16", "--width", "32", "--heads", "2", "--layers", "2", "--sample", "4")
    settings = (
        "--use-deepspeed",
        "--zero-stage",
        "3",
        "--gradient-clipping",
        "1.0",
        "--zero3-save-16bit-model",
        "true",
    )
    launch = ("launch", "--cpu", "-n", "2")
    losses = []
    for words, steps in ((settings, "20"), (settings, "40"), ((), "20")):
        if not words:
            assert (folder / "runs" / "model" / "model.safetensors").is_file()
            shutil.rmtree(folder / "runs")
        done = _orc(*launch, *words, "train.py", *small, "--steps", steps, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert ("ZeRO stage 3" in done.stdout) is bool(words)
        assert ("after step 20" in done.stdout) is (bool(words) and steps == "40")
        losses += re.findall(r"^step +\d+/\d+  loss (\d\.\d+)$", done.stdout, re.MULTILINE)
    first, second, replicas = map(float, losses)
    assert first == pytest.approx(replicas, abs=2e-4)
    assert second < first < 4.5


def test_the_text_of_char_gpt_is_long_enough_and_plain() -> None:
    folder = Path(__file__).parents[2] / "templates" / "starters" / "char-gpt"
    text = (folder / "shakespeare.txt").read_text(encoding="ascii")
    assert len(text) > 30_000
    assert "public domain" in (folder / "NOTICE").read_text()
