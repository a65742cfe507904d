"""An unmodified job of Transformers' Trainer that is preempted goes on at the same sample, and has metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 24
# A program like any other: it knows of neither orc nor checkpoints that it should resume.
TRAIN = """
import os, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if os.path.exists("slowly"):
            open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
            time.sleep(0.15)
        row = torch.arange(index, index + 8) % 32
        return {"input_ids": row, "labels": row}

set_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, attention_dropout=0.1, use_cache=False, **sizes))
settings = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=2, max_steps=24, learning_rate=1e-2,
                             report_to="none", save_strategy="no", logging_steps=4, disable_tqdm=True)
trainer = Trainer(model, settings, train_dataset=Tokens())
trainer.train()
weights = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
losses = [round(row["loss"], 4) for row in trainer.state.log_history if "loss" in row]
if trainer.is_world_process_zero():
    print("steps", trainer.state.global_step, "weights", f"{weights:.3f}", losses[-2:], flush=True)
"""
JOB = """
name: trainer
script: train.py
resources: {procs_per_node: 2}
runtime: {stand_in: [accelerate], use_cpu: true, metrics_interval_s: 0.2}
retry: {max_attempts: 2, on: [preempted], backoff: 0}
"""


def orc(folder: Path, *args: str, status: tuple[int, ...] = (0,)) -> str:
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", *args]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode in status, f"orc {' '.join(args)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def result(output: str) -> str:
    return next(line[line.index("steps ") :] for line in output.splitlines() if "weights " in line)


def test_a_preempted_trainer_job_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.yaml").write_text(JOB)
    expected = result(orc(tmp_path, "launch", "-n", "2", "--stand-in", "accelerate", "train.py"))
    assert expected.startswith(f"steps {STEPS} ")
    (tmp_path / "slowly").touch()
    job = json.loads(orc(tmp_path, "submit", "job.yaml", "--json"))["id"]
    state = Path(os.environ["ORC_STATE_DIR"]) / "jobs" / job
    try:
        deadline = time.monotonic() + 300
        while not (found := list(state.glob("**/pid-1"))) or not found[0].read_text():
            assert time.monotonic() < deadline, orc(tmp_path, "logs", job, status=(0, 2))
            time.sleep(0.05)
        time.sleep(1)  # in the middle of an epoch, if this machine is not very slow: any place will do
        os.kill(int(found[0].read_text()), signal.SIGTERM)  # one rank is told
        orc(tmp_path, "wait", job, "--timeout", "350", status=(0, 1, 3, 6))
        view: dict[str, Any] = json.loads(orc(tmp_path, "status", job, "--json", status=(0, 1, 3)))["jobs"][0]
        assert view["state"] == "SUCCEEDED", orc(tmp_path, "logs", job, status=(0, 2))
        assert [attempt["cause"] for attempt in view["attempts"]] == ["preempted", None]
        first, second = (orc(tmp_path, "logs", job, "--attempt", number) for number in "12")
        assert "orc: preempted after step" in first
        assert "orc: resuming out/checkpoint-" in second
        assert result(second) == expected
        assert "loss" in orc(tmp_path, "metrics", job)
    finally:
        orc(tmp_path, "cancel", job, status=tuple(range(128)))
