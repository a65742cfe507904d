"""Code in the files of a checkpoint does not run: whoever may write them may have corrected the manifest, too."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orc.runtime import Accelerator, load_checkpoint_in_model
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import read_manifest
from orc.runtime.checkpoint.storage.durable import write_file
from orc.runtime.utils import load


class Code:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Counter:
    def state_dict(self):
        return {"count": 1}

    def load_state_dict(self, state):
        pass


def accelerator():
    """An Accelerator with one of everything that leaves a file in a checkpoint."""
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.prepare(model, optimizer, scheduler, torch.utils.data.DataLoader(range(4), shuffle=True))
    accelerator.register_for_checkpointing(Counter())
    return accelerator


def infect(directory: Path, name: str, content: bytes) -> None:
    """Put *content* in the place of a file of a checkpoint, and its size and checksum into the manifest."""
    (directory / name).unlink()
    manifest = read_manifest(directory)
    changed = replace(manifest, files={**manifest.files, name: write_file(directory / name, content)})
    (directory / "manifest.json").write_bytes(changed.to_json())


@pytest.mark.parametrize("archive", [True, False], ids=["torch.save", "pickle"])
def test_no_file_of_a_checkpoint_runs_code(tmp_path, monkeypatch, archive):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # a user's setting for other files
    ran = tmp_path / "ran"
    with open(tmp_path / "bad", "wb") as file:
        torch.save({"state": Code(ran)}, file) if archive else pickle.dump({"state": Code(ran)}, file)
    accelerator().save_state(tmp_path / "good", safe_serialization=False)
    names = sorted(read_manifest(tmp_path / "good").files)
    assert {Path(name).suffix for name in names} >= {".bin", ".pkl"}
    assert len(names) >= 6
    refused = []
    for number, name in enumerate(names):
        directory = tmp_path / str(number)
        accelerator().save_state(directory, safe_serialization=False)
        infect(directory, name, (tmp_path / "bad").read_bytes())
        try:
            accelerator().load_state(directory)
        except CheckpointError:
            refused.append(name)
        assert not ran.exists(), name
    assert {name for name in names if name.endswith((".bin", ".pkl"))} <= {*refused}


def test_no_file_of_weights_runs_code(tmp_path):
    ran = tmp_path / "ran"
    weights = tmp_path / "weights"
    weights.mkdir()
    torch.save({"weight": Code(ran)}, weights / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|pickle"):
        load_checkpoint_in_model(torch.nn.Linear(2, 2), weights)
    with pytest.raises(pickle.UnpicklingError):
        load(weights / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": {"weight": "part.bin", "bias": "part.bin"}}
    (weights / "pytorch_model.bin").rename(weights / "part.bin")
    (weights / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(Exception, match=r"(?i)weights.only|pickle"):
        load_checkpoint_in_model(torch.nn.Linear(2, 2), weights)
    assert not ran.exists()
