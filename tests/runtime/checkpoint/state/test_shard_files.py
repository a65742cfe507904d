"""Folders of shards: torch reads ours, we read torch's, and nothing that is read can run code."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from orc.runtime import Accelerator
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.merge import merge_fsdp_weights, read_model
from orc.runtime.checkpoint.state.shard_files import read_metadata
from orc.runtime.checkpoint.state.strategies import strategy_named
from orc.runtime.parallel.records import described


def exchange(root):
    """Shards written by each and read by the other."""
    from torch.distributed.fsdp import fully_shard

    from orc.runtime.utils import load_fsdp_model, save_fsdp_model

    accelerator = Accelerator()
    model = torch.nn.Linear(5, 3)
    fully_shard(model)
    model = accelerator.prepare(model)
    before = accelerator.get_state_dict(model)
    save_fsdp_model(None, accelerator, model, root)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{root}/theirs")
    for folder in (f"{root}/pytorch_model_fsdp_0", f"{root}/theirs"):
        torch.nn.init.zeros_(model.weight)
        if folder.endswith("theirs"):
            load_fsdp_model(None, accelerator, model, folder)
        else:
            dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
    return before


@pytest.mark.distributed
def test_torch_reads_our_shards_and_we_read_torchs(tmp_path, run_ranks):
    before, _ = run_ranks(2, exchange, str(tmp_path))
    theirs = read_model(tmp_path / "theirs")
    assert all(torch.equal(theirs[name], before[name]) for name in before)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("where", ["metadata", "path", "value"])
def test_shards_that_would_run_code_or_lead_elsewhere_are_refused(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pytorch_model_0"
    value = Evil() if where == "value" else torch.ones(2)
    dcp.save({"model": {"weight": torch.ones(2), "extra": value}}, checkpoint_id=folder, no_dist=True)
    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    elif where == "path":
        metadata = read_metadata(folder)
        for place in metadata.storage_data.values():
            place.relative_path = "../elsewhere"
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"mkdir|elsewhere|cannot be loaded"):
        merge_fsdp_weights(folder, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_a_file_that_is_no_metadata_is_said_to_be_none(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({})))
    with pytest.raises(CheckpointError, match="it holds a Metadata"):
        read_metadata(tmp_path)
    with pytest.raises(CheckpointError, match="holds no sharded state"):
        read_metadata(tmp_path / "none")
    assert strategy_named("full").model_state(described(torch.nn.Linear(1, 1))).keys() == {"weight", "bias"}
