"""``if accelerator.is_main_process: accelerator.save_state()``, as published examples do, and ranks that are late."""

import contextlib
import gc
import io
import json
import os
import time
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, ProjectConfiguration
from orc.runtime.checkpoint.errors import CheckpointError, RankMissing
from orc.runtime.checkpoint.replication import absence
from orc.runtime.checkpoint.replication.absence import RankState, absence_reason
from orc.runtime.checkpoint.state.ownership import FILE

pytestmark = pytest.mark.distributed


def build(root, seed=0):
    """A model in DDP, its optimizer, schedule and shuffled loader, with gradients accumulated over two batches."""
    absence.POLL_S, absence.PATIENCE_S = 0.25, 0.5  # in this process only: ranks are forked
    torch.manual_seed(seed)
    fixed = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 4, generator=fixed))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    project = root and ProjectConfiguration(root, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)
    return accelerator, *accelerator.prepare(model, optimizer, schedule, DataLoader(data, batch_size=2, shuffle=True))


def train(run, epochs, save=lambda step: None):
    """Train as diffusers' examples do; *save* is called after each optimizer step. The loss of every batch."""
    accelerator, model, optimizer, schedule, loader = run
    losses, step = [], 0
    for _ in range(epochs):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - 1).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                step += 1
                save(step)
    return losses


def saved_by(directory):
    """What a manifest says about the random states of ranks, and their files."""
    manifest = json.loads((directory / "manifest.json").read_text())
    return manifest.get("random_states"), [name for name in manifest["files"] if "random" in name]


def listed(root):
    return sorted(name for name in os.listdir(root) if not name.startswith(FILE))


def test_the_main_process_saves_alone_and_all_go_on_from_there(tmp_path, run_ranks):
    def first(root, exported):
        run = build(root)
        accelerator, model = run[:2]
        times, text = [], io.StringIO()

        def save(step):
            if step in (1, 3) and accelerator.is_main_process:
                began = time.monotonic()
                accelerator.save_state()
                times.append(time.monotonic() - began)
                accelerator.save_model(model, exported)
                accelerator.save(accelerator.get_state_dict(model), f"{exported}/plain.pt")
                accelerator.save(accelerator.unwrap_model(model).state_dict(), f"{exported}/bare.pt")

        with contextlib.redirect_stderr(text):
            losses = train(run, 1, save)
            if accelerator.is_main_process:  # the others wait in the barrier
                began = time.monotonic()
                accelerator.save_state(block=False)
                times.append(time.monotonic() - began)
            accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            time.sleep(4)  # it computes, so it is late
        path = accelerator.save_state()  # of all ranks
        losses += train(run, 1)
        if not accelerator.is_main_process:
            try:
                accelerator.save_state(path)
            except RankMissing as error:
                late = str(error)
        else:
            late = ""
        accelerator.wait_for_everyone()
        accelerator.load_state(path)  # all ranks still meet
        return losses, times, text.getvalue(), os.path.basename(path), late

    def second(root, name):
        run = build(root, seed=50)
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            run[0].load_state(f"{root}/checkpoints/{name}")
        with torch.random.fork_rng():
            noise = torch.rand(1).item()
        return train(run, 2), text.getvalue(), noise, run[0].resume().step

    (losses, times, said, path, _), (others, _, nothing, _, late) = run_ranks(
        2, first, str(tmp_path), str(tmp_path / "exported")
    )
    assert max(times) < 20
    assert said.count("rank 0 saves alone (rank 1 goes on at ") == 1
    assert nothing == ""
    assert path == "checkpoint_3"
    assert "save_state: rank 0 is not here (rank 0 waits in a collective at " in late
    assert f"It has saved {tmp_path / 'checkpoints' / 'checkpoint_2'} alone" in late
    assert listed(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert listed(tmp_path / "exported") == ["bare.pt", "model.safetensors", "plain.pt"]
    assert saved_by(tmp_path / "checkpoints" / "checkpoint_1") == ([0], ["random_states_0.pkl"])
    together = (None, ["random_states_0.pkl", "random_states_1.pkl"])
    assert saved_by(tmp_path / "checkpoints" / "checkpoint_3") == together, "a late rank is part of it"

    ends = run_ranks(2, second, str(tmp_path), "checkpoint_1")
    assert [rest for rest, *_ in ends] == [losses[6:], others[6:]]
    assert "checkpoint_1 was saved by rank 0 alone" in ends[0][1]
    assert ends[1][1] == ""
    assert ends[0][2] != ends[1][2]
    assert {step for *_, step in ends} == {4}  # the whole run's last checkpoint


def test_the_main_process_saves_alone_where_the_others_save_by_themselves(tmp_path, run_ranks):
    def run(root):
        run = build(None)
        accelerator = run[0]

        def save(step):
            if step == 2 and accelerator.is_main_process:
                accelerator.save_state(f"{root}/mine")

        train(run, 1, save)
        accelerator.end_training()

    run_ranks(2, run, str(tmp_path), env={"ORC_CHECKPOINT_DIR": str(tmp_path / "all"), "ORC_CHECKPOINT_EVERY": "2"})
    assert saved_by(tmp_path / "mine")[0] == [0]
    assert listed(tmp_path / "all") == ["checkpoint_0", "checkpoint_1"]
    assert saved_by(tmp_path / "all" / "checkpoint_0")[0] is None


def test_machines_without_a_shared_directory_copy_what_the_main_process_saved(tmp_path, run_ranks):
    def run(root):
        run = build(f"{root}/{os.environ['GROUP_RANK']}")
        accelerator, weights = run[0], []

        def save(step):
            weights.append(accelerator.unwrap_model(run[1]).weight.tolist())
            if step == 1 and accelerator.is_main_process:
                accelerator.save_state()

        train(run, 1, save)
        accelerator.load_state()
        return accelerator.unwrap_model(run[1]).weight.tolist() == weights[0]

    assert run_ranks(2, run, str(tmp_path), nodes=2) == [True, True]
    assert listed(tmp_path / "0" / "checkpoints") == listed(tmp_path / "1" / "checkpoints") == ["checkpoint_0"]


def test_a_training_that_is_over_leaves_its_models_to_the_garbage_collector(run_ranks):
    def run():
        model = weakref.ref(build(None)[1].module)
        gc.collect()
        return model() is None

    assert run_ranks(2, run) == [True, True]


def test_what_is_spread_over_the_ranks_is_refused_on_the_main_process(tmp_path, run_ranks):
    def run(root):
        from torch.distributed.fsdp import fully_shard

        absence.POLL_S = 0.25
        accelerator, model = Accelerator(), torch.nn.Linear(4, 2)
        fully_shard(model)
        model = accelerator.prepare(model)
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        text, began = "", time.monotonic()
        if accelerator.is_main_process:
            try:
                accelerator.save_state(root)
            except CheckpointError as error:
                text = str(error)
        accelerator.backward(model(torch.ones(1, 4)).sum())
        return text, time.monotonic() - began

    (text, took), _ = run_ranks(2, run, str(tmp_path / "there"))
    assert "rank 0 cannot save alone, each rank holds a part of FSDPLinear" in text
    assert "Call save_state on every rank" in text
    assert took < 20
    assert not (tmp_path / "there").exists()


HERE = RankState(((3, 0, 5),), {"cpu": 10}, "checkpoint", "train.py:9", 1.0, 50.0)


def other(progress=((3, 0, 5),), collectives=11, activity="collective", where="train.py:7", processor_s=1.0, at_s=2.0):
    return RankState(progress, {"cpu": collectives}, activity, where, processor_s, at_s)


@pytest.mark.parametrize(
    ("before", "now", "stays"),
    [
        (None, other(((3, 0, 6),), 10, "script"), True),  # a batch further
        (None, other(((4, 0, 5),), 10, "script"), True),  # a step further
        (None, other(((4, 0, 4),), 10, "script"), False),  # behind in the data
        (None, other(((3, 1, 9),), 10, "data"), False),  # it reads another loader
        (None, other(((3, 0, 6), (0, -1, 0)), 10), False),  # another number of Accelerators
        (None, other(), False),  # it has been seen there once only
        (other(), other(at_s=3.9), False),
        (other(), other(at_s=4.0), True),
        (other(), other(at_s=40.0, activity="script"), False),
        (other(activity="script"), other(at_s=40.0, activity="script"), False),
        (other(where="train.py:6"), other(at_s=40.0), False),
        (other(collectives=12), other(at_s=40.0, collectives=13), False),  # the operations go on
        (other(collectives=10), other(at_s=40.0, collectives=10), False),  # rank 0 has been in it
        (other(activity="backward"), other(at_s=4.0, activity="backward", processor_s=1.05), True),
        (other(activity="backward"), other(at_s=4.0, activity="backward", processor_s=2.9), False),  # it computes
    ],
)
def test_a_rank_stays_away_only_where_it_cannot_come(before, now, stays):
    assert (absence_reason(HERE, before, now) is not None) is stays
    assert RankState.from_json(now.to_json()) == now
