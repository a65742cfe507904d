"""A job of an unmodified program of Transformers' Trainer, each step of which can be compared with another run's.

It takes its time in the first run, so that what is to befall it comes before the end.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import Orc

STEPS = 30  # 3 epochs
# A program like any other: it knows of neither orc nor checkpoints that it should resume.
SCRIPT = """
import os, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

slowly = (os.environ.get("ORC_ATTEMPT"), os.environ.get("ORC_RESTART")) == ("1", "0")

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if slowly:
            time.sleep(0.2)
        row = torch.arange(index, index + 8)
        return {"input_ids": row, "labels": row}

def show(module, args, inputs):  # what is trained: the first token of a sample is its number
    print("trained", trainer.state.global_step + 1, inputs["input_ids"][:, 0].tolist(), flush=True)

set_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, use_cache=False, **sizes))
model.register_forward_pre_hook(show, with_kwargs=True)
settings = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=2, max_steps=30, learning_rate=1e-2,
                             report_to="none", save_strategy="no", logging_steps=4, disable_tqdm=True)
trainer = Trainer(model, settings, train_dataset=Tokens())
print("pid", os.getpid(), flush=True)
trainer.train()
weights = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
losses = [round(row["loss"], 4) for row in trainer.state.log_history if "loss" in row]
print("steps", trainer.state.global_step, "weights", f"{weights:.3f}", losses[-2:], flush=True)
"""
JOB: dict[str, Any] = {
    "runtime": {"stand_in": ["accelerate"], "use_cpu": True, "metrics_interval_s": 0.2},
    "retry": {"max_attempts": 2, "on": ["preempted"], "backoff": 0},
}


@dataclass(frozen=True)
class Course:
    """Record of one rank: the samples of each step in order, and the figures at its end."""

    trained: list[str]
    figures: list[str]

    @classmethod
    def of(cls, log: str) -> Course:
        """Return what a rank's output tells."""
        return cls(re.findall(r"^trained .*$", log, re.MULTILINE), re.findall(r"^steps .*$", log, re.MULTILINE))


def undisturbed(directory: Path) -> list[Course]:
    """Return the courses of the two ranks of the program on this machine, outside of any job."""
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "launch", "-n", "2", "--stand-in", "accelerate"]
    argv += ["--log-dir", "logs", "train.py"]
    subprocess.run(argv, cwd=directory, check=True, capture_output=True, timeout=300)
    courses = [Course.of((directory / "logs" / f"rank-{rank}.log").read_text()) for rank in (0, 1)]
    for course in courses:
        assert len(course.trained) == STEPS
        assert len(course.figures) == 1
    numbers = [int(number) for course in courses for line in course.trained for number in re.findall(r"\d+", line)[1:]]
    assert sorted(numbers) == sorted(3 * list(range(40)))  # every sample once in each epoch
    return courses


def check_preempted(orc: Orc, directory: Path, preempt: Callable[[str], object], **resources: Any) -> dict[str, Any]:
    """Preempt the job once, in mid-epoch, and compare it with a run that nobody disturbed; its last view.

    Args:
        orc: The command line, with the job's cluster.
        directory: A new directory for the other run.
        preempt: Takes the job's id and has the job preempted.
        resources: The job's ``resources``, for two ranks.
    """
    expected = undisturbed(directory)
    orc.write_job(SCRIPT, **JOB, resources=resources)
    job = orc.submit()
    orc.until_log(job, 1, "trained 3 ")
    preempt(job)
    orc("wait", job, status=(0, 1, 3, 6))
    view = orc.job(job)
    attempts = [str(attempt["number"]) for attempt in view["attempts"]]
    logs = ["".join(orc.log(job, rank, "--attempt", number) for number in attempts) for rank in (0, 1)]
    assert view["state"] == "SUCCEEDED", (view, logs)
    saved = re.findall(r"orc: preempted after step (\d+)", logs[0])
    assert len(saved) == 1, logs
    assert re.findall(r"orc: resuming out/checkpoint-(\d+)", logs[0]) == saved
    for log, other in zip(logs, expected, strict=True):
        assert Course.of(log) == other, log
    assert "loss" in orc("metrics", job)
    return view
