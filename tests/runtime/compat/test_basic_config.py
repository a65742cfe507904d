"""The documented configuration file."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from orc.launchers.accelerate.config_file import read_config
from orc.runtime import write_basic_config
from orc.runtime.compat.basic_config import default_config_folder


def test_documented_places():
    assert default_config_folder({"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/accelerate")
    assert default_config_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/huggingface/accelerate")
    assert default_config_folder({}) == Path("~/.cache/huggingface/accelerate").expanduser()


def test_a_machine_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = write_basic_config()
    assert path == tmp_path / "accelerate/default_config.yaml"
    config = read_config(path).values  # what `orc launch` reads
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "no"  # by the rules of any version of YAML
    assert (config["distributed_type"], config["cpu"], config["num_processes"]) == ("NO", True, 1)


def test_all_gpus_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = json.loads(write_basic_config("fp16", tmp_path / "new/c.json").read_text())
    assert config == {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "fp16",
        "num_machines": 1,
        "num_processes": 2,
        "rdzv_backend": "static",
        "same_network": False,
        "use_cpu": False,
    }


def test_an_existing_file_stays(tmp_path, capsys):
    (tmp_path / "c.json").write_text("mine")
    assert write_basic_config(save_location=tmp_path / "c.json") is False
    assert (tmp_path / "c.json").read_text() == "mine"
    assert "exists already" in capsys.readouterr().out


def test_an_unknown_precision_is_refused(tmp_path):
    with pytest.raises(ValueError, match="should be one of no, fp16, bf16, fp8; received fp4"):
        write_basic_config("fp4", tmp_path / "c.json")
    assert list(tmp_path.iterdir()) == []
