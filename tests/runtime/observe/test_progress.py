"""How far the run is, for those who watch it."""

import json

import torch
from torch.utils.data import DataLoader

from orc.runtime import Accelerator
from orc.runtime.core.context import reset_default
from orc.runtime.observe.progress import ProgressFile


def test_progress_is_written_at_most_once_per_interval(tmp_path):
    file = ProgressFile(tmp_path / "progress.json", interval_s=1000)
    file.update(1, 0, 8)
    file.update(2, 0, 16)
    assert json.loads(file.path.read_text())["step"] == 1
    file.flush()
    content = json.loads(file.path.read_text())
    assert (content["step"], content["epoch"], content["samples"]) == (2, 0, 16)
    file.update(3, 0, 24, of=None, loss=0.5)
    file.flush()
    content = json.loads(file.path.read_text())
    assert content["loss"] == 0.5
    assert "of" not in content
    assert [entry.name for entry in tmp_path.iterdir()] == ["progress.json"]


def test_a_directory_that_is_gone_does_not_stop_training(tmp_path, caplog):
    file = ProgressFile(tmp_path / "gone" / "progress.json", interval_s=0)
    for step in range(3):
        file.update(step, 0, 0)
    assert sum("progress is not reported any more" in record.message for record in caplog.records) == 1


def test_rank_0_of_a_job_tells_step_epoch_samples_and_how_many_an_epoch_has(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ORC_ATTEMPT_DIR", str(tmp_path))
    (tmp_path / "node-0").mkdir()
    reset_default()
    accelerator = Accelerator()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.randn(8, 3), batch_size=2))
    for _ in range(2):
        for x in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
    accelerator._watching.boundary._progress.flush()
    accelerator._watching.boundary._preemption.close()
    reset_default()
    content = json.loads((tmp_path / "node-0" / "progress.json").read_text())
    assert (content["step"], content["epoch"], content["samples"], content["of"]) == (8, 1, 8, 8)
