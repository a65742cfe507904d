"""`orc merge-weights`: the shards of a model in one file."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from ..conftest import Run


def test_shards_are_merged_into_a_file_of_either_kind(orc: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from torch.distributed import checkpoint

    weights = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.ones(2)}
    saved, out = tmp_path / "ckpt", tmp_path / "out"
    with warnings.catch_warnings():  # that there is no process group
        warnings.simplefilter("ignore")
        checkpoint.save({"model": weights}, checkpoint_id=saved / "pytorch_model_fsdp_0", no_dist=True)
    assert orc("merge-weights", str(saved / "pytorch_model_0"), str(out)).out == f"wrote {out / 'model.safetensors'}\n"
    done = orc("merge-weights", "--unsafe_serialization", "--remove_checkpoint_dir", "--json", str(saved), str(out))
    assert done.json == {"file": str(out / "pytorch_model.bin")}
    for merged in (load_file(out / "model.safetensors"), torch.load(out / "pytorch_model.bin", weights_only=True)):
        assert merged.keys() == weights.keys()
        assert all(torch.equal(merged[name], weights[name]) for name in weights)
    refused = orc("merge-weights", str(saved), str(out))
    assert refused.code == 2
    assert "holds no shards of a model" in refused.err
