"""What does not fit is refused with everything as it was before."""

import json
import os
import random
from dataclasses import replace

import pytest
import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import NAME, read_manifest
from orc.runtime.checkpoint.storage.durable import checksum


class Counter:
    """A registered object that may refuse."""

    refuses = False

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        if self.refuses:
            raise OverflowError("too many")


class Own(torch.nn.Linear):
    """A model that says only while it loads that it does not like something."""

    refuses = False

    def load_state_dict(self, state, *args, **kwargs):
        result = super().load_state_dict(state, *args, **kwargs)
        if self.refuses:
            raise RuntimeError("not mine")
        return result


def reseal(directory, name, content):
    """Replace a file by one that the manifest calls whole."""
    torch.save(content, directory / name)
    manifest = read_manifest(directory)
    manifest = replace(manifest, files={**manifest.files, name: checksum(directory / name)})
    (directory / NAME).write_bytes(manifest.to_json())


class Runs:
    """What runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def split_groups(run, directory):
    optimizer = run.optimizer.optimizer
    first, *rest = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [first]
    optimizer.add_param_group({"params": rest})


def senseless(name, content):
    return lambda run, directory: reseal(directory, name, content)


def refusing(part):
    def do(run, directory):
        getattr(run, part).refuses = True

    return do


def widen(run, directory):
    run.second.weight.data = torch.ones(5, 2)


POSITION = {"epoch": 0, "live": True, "rounds": 0, "offset": 0, "global_batch": 4, "length": 24, "key": None}
RANDOM_STATES = {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": ("MT19937", [1], 0, 0, 0.0)}
MISFITS = {
    "other parameter groups": (split_groups, r"optimizer\.bin does not fit.*groups of \[4\].*has \[1, 3\]"),
    "second model": (widen, r"model_1\.safetensors does not fit.*size mismatch of weight: \[2, 2\].*\[5, 2\] here"),
    "registered object": (refusing("counter"), r"custom_checkpoint_0\.pkl does not fit.*OverflowError: too many"),
    "model of its own": (refusing("own"), r"model_2\.safetensors does not fit.*not mine"),
    "optimizer list": (senseless("optimizer.bin", [1]), r"optimizer\.bin does not fit.*it holds a list"),
    "optimizer empty": (senseless("optimizer.bin", {}), r"optimizer\.bin does not fit.*not the state of an optimizer"),
    "optimizer groups": (senseless("optimizer.bin", {"param_groups": 3, "state": {}}), r"optimizer\.bin does not fit"),
    "sampler list": (senseless("sampler.bin", [1]), r"sampler\.bin is no position of a loader: it holds a list"),
    "sampler empty": (senseless("sampler.bin", {}), r"sampler\.bin is no position of a loader: its epoch is None"),
    "sampler epoch": (senseless("sampler.bin", POSITION | {"epoch": -1}), r"sampler\.bin.*its epoch is -1"),
    "sampler generator": (senseless("sampler.bin", POSITION | {"generator": 3}), r"sampler\.bin.*generator is a int"),
    "scheduler": (senseless("scheduler.bin", 5), r"scheduler\.bin does not fit"),
    "random array": (senseless("random_states_0.pkl", RANDOM_STATES), "random number generators cannot be restored"),
    "random states": (senseless("random_states_0.pkl", {"python": 3}), "random number generators cannot be restored"),
}


@pytest.mark.parametrize("misfit", list(MISFITS))
def test_a_misfit_is_refused_with_everything_as_before(tmp_path, make_run, misfit):
    run = make_run()
    run.second, run.own = run.accelerator.prepare(torch.nn.Linear(2, 2), Own(2, 2))
    run.first_counter, run.counter = Counter(1), Counter(2)
    run.accelerator.register_for_checkpointing(run.counter, run.first_counter)
    run.run().accelerator.save_state(tmp_path / "s")
    do, message = MISFITS[misfit]
    do(run, tmp_path / "s")
    run.run()
    run.counter.count = run.first_counter.count = 3
    with torch.no_grad():
        run.second.weight.add_(1)
        run.own.weight.add_(1)

    def everything():
        weights = [run.second.weight.tolist(), run.own.weight.tolist()]
        return run.state(), weights, run.counter.count, run.first_counter.count, run.loader.state_dict()["epoch"]

    before = everything()
    with pytest.raises(CheckpointError, match=message):
        run.accelerator.load_state(tmp_path / "s")
    assert everything() == before


@pytest.mark.distributed
def test_what_one_rank_cannot_load_is_put_back_on_all(tmp_path, run_ranks):
    def scenario(root):
        from orc.runtime import Accelerator

        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        counter = Counter(1)
        accelerator.register_for_checkpointing(counter)
        accelerator.save_state(root)
        counter.count, counter.refuses = 5, accelerator.process_index == 1
        before = [parameter.tolist() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match="too many"):
            accelerator.load_state(root)
        return counter.count, before == [parameter.tolist() for parameter in model.parameters()]

    assert run_ranks(2, scenario, str(tmp_path / "s")) == [(5, True)] * 2


@pytest.mark.parametrize("name", ["step", "epoch", "offset", "world_size", "id", "created_at", "files"])
def test_a_manifest_that_was_changed_is_seen(tmp_path, make_run, name):
    run = make_run()
    run.run().accelerator.save_state(tmp_path / "s")
    data = json.loads((tmp_path / "s" / NAME).read_text())
    if name == "files":
        del data["files"]["sampler.bin"]
    else:
        data[name] = f"{data[name]}0" if name == "id" else data[name] + 1
    (tmp_path / "s" / NAME).write_text(json.dumps(data))
    before = run.state()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: .*its own checksum"):
        run.accelerator.load_state(tmp_path / "s")
    assert run.state() == before


def test_no_option_lets_a_checkpoint_run_code(tmp_path, make_run):
    run = make_run()
    run.accelerator.save_state(tmp_path / "s")
    reseal(tmp_path / "s", "scheduler.bin", {"now": Runs(tmp_path / "ran")})
    with (
        pytest.warns(UserWarning, match="weights_only"),
        pytest.raises(CheckpointError, match=r"scheduler\.bin cannot be loaded"),
    ):
        run.accelerator.load_state(tmp_path / "s", load_kwargs={"weights_only": False})
    assert not (tmp_path / "ran").exists()
