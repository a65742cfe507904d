"""Two ranks: over gloo on one GPU, which NCCL refuses, and over NCCL where there are two GPUs."""

import os
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orc.runtime import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
    TorchTensorParallelConfig,
)
from orc.runtime.testing import RankFailure

ON = os.environ.get("ORC_GPU_TESTS_ON", "cuda")
STEPS = 6


def samples(count=96):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 1)
    )


class Rows(IterableDataset):
    def __iter__(self):
        return iter(samples(20).tensors[0])


def begin(backend, **options):
    handlers = [InitProcessGroupKwargs(backend=backend)]
    accelerator = Accelerator(kwargs_handlers=handlers, **options)
    assert accelerator.num_processes == 2
    assert dist.get_world_size() == 2
    return accelerator


def train(accelerator, model, optimizer, loader, steps=STEPS):
    """The mean loss of both ranks at each step."""
    losses = []
    while len(losses) < steps:
        for inputs, wanted in loader:
            assert inputs.device == accelerator.device
            loss = nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == steps:
                break
    return losses


def by_hand(device, batch_size=16):
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for inputs, wanted in DataLoader(samples(), batch_size=batch_size):
        loss = nn.functional.mse_loss(model(inputs.to(device)), wanted.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[:STEPS], {name: value.cpu() for name, value in model.state_dict().items()}


def agree(found, device, batch_size=16):
    """Both ranks have the losses and the weights of a loop by hand over the batches of both."""
    losses, weights = by_hand(device, batch_size)
    for mine, state in found:
        assert mine == pytest.approx(losses, rel=2e-3)
        for name, value in (state or weights).items():
            assert torch.allclose(value, weights[name], rtol=2e-2, atol=2e-3), name


def whole(accelerator, model):
    return {name: value.cpu().clone() for name, value in accelerator.get_state_dict(model).items()}


# ---- DistributedDataParallel


def replicas(backend, precision):
    accelerator = begin(backend, mixed_precision=precision)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=8))
    losses = train(accelerator, model, optimizer, loader)
    state = whole(accelerator, model)
    accelerator.end_training()
    return losses, state


def test_replicas_train_as_one_model(two_ranks, device):
    agree(two_ranks(replicas, "no"), device)


def test_replicas_learn_in_bf16(two_ranks, device):
    (mine, _), (theirs, _) = two_ranks(replicas, "bf16")
    assert mine == theirs
    assert mine == pytest.approx(by_hand(device)[0], rel=0.1)


# ---- collectives


def collectives(backend):
    accelerator = begin(backend)
    rank, device = accelerator.process_index, accelerator.device
    rows = torch.full((2, 3), float(rank), device=device)
    parts = {"rows": rows, "more": [torch.tensor(rank, device=device), torch.arange(rank + 1, device=device)[:1]]}
    gathered = accelerator.gather(parts)
    assert gathered["rows"].device == device
    large = torch.full((300_000,), float(rank + 1), device=device)
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, 2, device=device))
    accelerator.wait_for_everyone()
    found = [
        gathered["rows"][:, 0].tolist(),
        gathered["more"][0].tolist(),
        accelerator.reduce(rows, "sum").sum().item(),
        accelerator.reduce(large, "mean")[-1].item(),
        accelerator.gather(large).sum().item(),
        accelerator.gather(padded).sum().item(),
        accelerator.gather_for_metrics([f"of {rank}"], use_gather_object=True),
        accelerator.reduce(torch.tensor([True], device=device)).item(),
    ]
    if rank == 1:
        accelerator.set_trigger()
    found.append(accelerator.check_trigger())
    metrics = []
    for inputs, _ in accelerator.prepare(DataLoader(samples(21), batch_size=4)):
        metrics += accelerator.gather_for_metrics(inputs)[:, 0].tolist()
    found.append(metrics)
    accelerator.end_training()
    return found


def test_collectives_reach_both_ranks(two_ranks):
    wanted = [
        *([0.0, 0.0, 1.0, 1.0], [0, 1], 6.0, 1.5, 900_000.0, 6.0),
        *(["of 0", "of 1"], 2, True),
        samples(21).tensors[0][:, 0].tolist(),
    ]
    assert two_ranks(collectives) == [wanted, wanted]


def repeated(backend):
    accelerator = begin(backend)
    rank, device = accelerator.process_index, accelerator.device
    found = []
    for rows in (4, 4, 4, 4, 4, 3, 4, 4, 4, 2):  # after the third time they begin without a meeting
        value = torch.full((rows, 2), float(rank + 1), device=device)
        found.append(accelerator.gather(value).sum().item() / rows)
        found.append(accelerator.reduce(value, "mean").sum().item() / rows)
    accelerator.end_training()
    return found


def test_collectives_of_a_loop_are_right_also_where_its_batches_become_shorter(two_ranks):
    assert two_ranks(repeated) == [[6.0, 3.0] * 10] * 2


def sums(backend, on_device):
    accelerator = begin(backend, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = samples(24).tensors[0].to(accelerator.device)
    # Two batches of each rank make up a step, of different sizes.
    for rows in ([slice(0, 3), slice(3, 10)], [slice(10, 23), slice(23, 24)])[accelerator.process_index]:
        with accelerator.accumulate(model):
            count = rows.stop - rows.start
            count = torch.tensor(count, device=accelerator.device) if on_device else count
            accelerator.backward(model(inputs[rows]).square().sum(), normalize_by=count)
            optimizer.step()
    state = whole(accelerator, model)
    accelerator.end_training()
    return state


@pytest.mark.parametrize("on_device", [True, False])
def test_losses_that_are_sums_are_divided_by_the_items_of_both_ranks(two_ranks, device, on_device):
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(samples(24).tensors[0].to(device)).square().mean().backward()
    optimizer.step()
    for state in two_ranks(sums, on_device):
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value.cpu(), rtol=1e-3, atol=1e-5), name


def operands_that_differ(backend):
    accelerator = begin(backend)
    texts = []
    for shape in ((2, 3), (2, 3), (2, 3 + accelerator.process_index)):
        try:
            accelerator.gather(torch.ones(shape, device=accelerator.device))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    after = accelerator.gather(torch.ones(1, device=accelerator.device)).sum().item()
    accelerator.end_training()
    return texts, after


def test_operands_that_differ_are_told_on_both_and_the_run_goes_on(two_ranks):
    for texts, after in two_ranks(operands_that_differ):
        (text,) = texts
        assert text.startswith("DistributedOperationException: Cannot apply desired operation due to shape mismatches")
        assert after == 2.0


# ---- loaders


def loaders(backend, group):
    if group:
        dist.init_process_group(group)  # the script's own
    accelerator = begin(backend, dataloader_config=DataLoaderConfiguration(dispatch_batches=None))
    found = {}
    torch.manual_seed(7 + accelerator.process_index)
    shuffled = accelerator.prepare(DataLoader(samples(24), batch_size=4, shuffle=True))
    found["shuffled"] = [accelerator.gather(inputs)[:, 0].tolist() for inputs, _ in shuffled]
    shared = accelerator.prepare(DataLoader(Rows(), batch_size=4))
    found["iterable"] = [accelerator.gather(rows)[:, 0].tolist() for rows in shared]
    accelerator.dataloader_config.dispatch_batches = True
    dispatched = accelerator.prepare(DataLoader(Rows(), batch_size=4))
    parts = []
    for rows in dispatched:
        assert rows.device == accelerator.device
        parts.append(rows[:, 0].tolist())
    found["dispatched"] = parts
    if not group:
        accelerator.end_training()
    return found


def right_batches(first, second):
    inputs = samples(24).tensors[0][:, 0].tolist()
    rows = samples(20).tensors[0][:, 0].tolist()
    assert first["shuffled"] == second["shuffled"]
    assert sorted(chain(*first["shuffled"])) == sorted(inputs)
    assert list(chain(*first["iterable"]))[:20] == rows
    assert first["iterable"] == second["iterable"]
    together = [mine + theirs for mine, theirs in zip(first["dispatched"], second["dispatched"], strict=True)]
    assert list(chain(*together))[:20] == rows


def test_each_rank_gets_its_share_of_every_kind_of_loader(two_ranks):
    right_batches(*two_ranks(loaders, ""))


@pytest.mark.cuda_only
def test_loaders_work_in_a_group_of_the_script_that_carries_no_cpu_tensors(two_ranks, request):
    backend = request.node.callspec.params["two_ranks"]
    right_batches(*two_ranks(loaders, "nccl" if backend == "nccl" else "cuda:gloo"))


# ---- what is cut


def sharded(backend, directory, ignored):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        state_dict_type="SHARDED_STATE_DICT",
        ignored_modules="1" if ignored else None,
    )
    accelerator = begin(backend, fsdp_plugin=plugin)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=8))
    losses = [train(accelerator, model, optimizer, loader, 3)]
    accelerator.save_state(directory)
    losses.append(train(accelerator, model, optimizer, loader, 3))
    accelerator.load_state(directory)
    losses.append(train(accelerator, model, optimizer, loader, 3))
    shapes = {name: list(value.shape) for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return losses, shapes


@pytest.fixture
def shards_on_two_ranks(two_ranks, request):
    """As ``two_ranks``; over gloo on the CPU alone."""
    if ON == "cuda" and request.node.callspec.params["two_ranks"] == "gloo":
        pytest.skip("over gloo shards on GPUs are refused, and there is another test of that")
    return two_ranks


@pytest.mark.cuda_only
@pytest.mark.parametrize("two_ranks", ["gloo"], indirect=True)
def test_shards_are_refused_over_gloo(two_ranks, tmp_path):
    for spread, options in ((sharded, (tmp_path, False)), (parted, ("no",))):
        with pytest.raises(RankFailure, match="use nccl, with one rank for each GPU"):
            two_ranks(spread, *options)


@pytest.mark.parametrize("ignored", [False, True], ids=["all", "norm ignored"])
def test_shards_train_as_one_model_and_go_on_after_a_checkpoint(shards_on_two_ranks, device, tmp_path, ignored):
    losses, weights = by_hand(device)
    answers = shards_on_two_ranks(sharded, tmp_path / "c", ignored)
    for (first, wanted, found), _ in answers:
        assert first == pytest.approx(losses[:3], rel=2e-3)
        # Ranks do not average gradients of what is ignored: rank 0's values of it were saved.
        assert found == pytest.approx(wanted, rel=0.05 if ignored else 1e-5)
    assert answers[0][1] == {name: list(value.shape) for name, value in weights.items()}


def parted(backend, precision):
    plan = {"0": "colwise_rep", "3": "colwise_rep"}  # the norms are not in it
    config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
    accelerator = begin(backend, parallelism_config=config, mixed_precision=precision)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=16))
    losses = train(accelerator, model, optimizer, loader)
    state = whole(accelerator, model)
    accelerator.end_training()
    return losses, state


def test_a_model_that_is_cut_by_a_plan_without_its_norms_trains_as_one(shards_on_two_ranks, device):
    agree(shards_on_two_ranks(parted, "no"), device)


# ---- resuming


def resumed(backend, directory):
    accelerator = begin(backend)
    torch.manual_seed(3)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    def steps(passes, save_at=None):
        losses = []
        for _ in range(passes):
            for number, (inputs, wanted) in enumerate(loader):
                loss = nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if number == save_at:
                    accelerator.save_state(directory)
                    losses.clear()
        return losses

    wanted = steps(1, save_at=2)
    accelerator.load_state(directory)
    found = steps(1)
    accelerator.end_training()
    return found, wanted


def test_training_goes_on_in_the_middle_of_an_epoch(two_ranks, tmp_path):
    for found, wanted in two_ranks(resumed, tmp_path / "c"):
        assert len(wanted) == 3
        assert found == wanted
