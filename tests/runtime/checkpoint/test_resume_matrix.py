"""A resumed run is the uninterrupted one, bit for bit: in every precision, with overflow, veto and NaN."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, GradScalerKwargs, ProjectConfiguration
from orc.runtime import testing as orc_testing

BATCHES = 5
SPECIAL = 2  # the batch at which something happens
EVERY = 2


class Interrupted(Exception):
    """The process ends here."""


def factor(kind: str, sample: float) -> float:
    """What the loss of a batch is multiplied by."""
    if sample != SPECIAL:
        return 1.0
    return {"plain": 1.0, "overflow": float("inf"), "veto": 1e6, "nan": float("nan")}[kind]


def live(folder, precision, kind, updates, *, stop=None):
    """Live as one process of the run and return its trace by update; raise before update *stop* of this process."""
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        mixed_precision=precision,
        project_config=project,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=3)] if precision == "fp16" else [],
        cpu=True,
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.3), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.arange(float(BATCHES)).unsqueeze(1)), batch_size=1, shuffle=True)
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    resumed = accelerator.resume()
    trace, updated = {}, 0
    for epoch in range(resumed.epoch if resumed else 0, 2):
        data.set_epoch(epoch)
        for (batch,) in data:
            for update in range(updates):
                if updated == stop:
                    raise Interrupted
                scaler = accelerator.scaler  # after the save of the last step: a look settles the scale
                scale = None if scaler is None else (scaler.get_scale(), scaler.state_dict()["_growth_tracker"])
                loss = model(batch + 1.0).square().sum() * factor(kind, batch.item())
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                updated += 1
                trace[epoch, data.samples_seen, update] = (
                    batch.item(),
                    torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes(),
                    json.dumps(optimizer.state_dict(), default=lambda tensor: tensor.numpy().tobytes().hex()),
                    schedule.state_dict()["last_epoch"],
                    schedule.get_last_lr(),
                    scale,
                )
    accelerator.end_training()
    return trace


def content(checkpoint):
    """What the tensors of a checkpoint's weights are, bit for bit."""
    weights = {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}
    assert weights, f"no weights in {checkpoint}"
    return weights


def saved(folder):
    """The checkpoints on disk: their steps, positions, usual gradient norms and weights."""
    found = []
    for path in sorted(folder.glob("checkpoints/checkpoint_*/manifest.json")):
        manifest = json.loads(path.read_text())
        found.append(
            [manifest[key] for key in ("step", "epoch", "offset")] + [manifest.get("norms"), content(path.parent)]
        )
    return found


@pytest.fixture
def life(monkeypatch):
    monkeypatch.setattr("orc.runtime.observe.spikes.WARM_UP", 1)
    monkeypatch.setenv("ORC_CHECKPOINT_EVERY", str(EVERY))

    def run(*args, **options):
        if args[2] == "veto":
            monkeypatch.setenv("ORC_SPIKE_ACTION", "skip")
        with orc_testing.isolated():
            return live(*args, **options)

    return run


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "overflow", "veto", "nan"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, life, precision, kind, updates):
    whole = life(tmp_path / "whole", precision, kind, updates)
    assert len(whole) == 2 * BATCHES * updates
    assert saved(tmp_path / "whole"), "no checkpoint was taken"
    # Once between each two checkpoints, which is all that a resumed run can know of where the last one ended.
    for stop in range(1, 2 * BATCHES * updates, updates + 1):
        folder = tmp_path / f"stopped-{stop}"
        with pytest.raises(Interrupted):
            life(folder, precision, kind, updates, stop=stop)
        rest = life(folder, precision, kind, updates)
        for place, facts in rest.items():
            assert facts == whole[place], (stop, place)
        assert list(whole)[-len(rest) :] == list(rest)
        assert saved(folder) == saved(tmp_path / "whole"), stop


def test_what_happens_in_the_matrix_happens(tmp_path, life):
    rates = {}
    for precision, kind in itertools.product(("no", "fp16"), ("plain", "overflow", "veto")):
        trace = life(tmp_path / f"{precision}-{kind}", precision, kind, 1)
        rates[precision, kind] = list(trace.values())[-1][3]
    assert rates["no", "plain"] == rates["fp16", "plain"] == 2 * BATCHES
    assert rates["no", "veto"] == 2 * BATCHES - 2  # a vetoed update does not advance the schedule
    assert rates["fp16", "overflow"] == 2 * BATCHES - 2


def test_updates_outside_of_the_loop_do_not_stop_automatic_checkpoints(tmp_path, monkeypatch):
    """A step that is a multiple may be taken where no batch is asked for: it is passed, and that counts."""
    monkeypatch.setenv("ORC_CHECKPOINT_EVERY", "4")
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    with orc_testing.isolated():
        accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(1, 1)
        data = DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=1)
        model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)

        def update():
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()

        update()  # warm-up: from here on no even number of steps is seen
        for (_,) in data:
            update()
            update()
        accelerator.end_training()
    assert [step for step, *_ in saved(tmp_path)] == [5, 9, 13, 17, 21, 25]


def test_a_save_elsewhere_takes_no_place_of_an_automatic_one(tmp_path, monkeypatch):
    """What `resume` does not find does not count as saved."""
    monkeypatch.setenv("ORC_CHECKPOINT_EVERY", "2")
    monkeypatch.setenv("ORC_CHECKPOINT_DIR", str(tmp_path / "automatic"))
    with orc_testing.isolated():
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        data = DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1)
        model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for (batch,) in data:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            accelerator.save_state(str(tmp_path / "best"))
        accelerator.end_training()
    steps = [json.loads(path.read_text())["step"] for path in tmp_path.glob("automatic/checkpoint_*/manifest.json")]
    assert steps == [2]
