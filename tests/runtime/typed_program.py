"""A training program as a user types it; `make typecheck` checks it with mypy --strict. It is not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

import orc.runtime as runtime
from orc.runtime import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    PartialState,
    ProjectConfiguration,
    dispatch_model,
    find_executable_batch_size,
    gather_object,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    notebook_launcher,
    set_seed,
    skip_first_batches,
)
from orc.runtime.logging import get_logger
from orc.runtime.state import AcceleratorState, GradientState
from orc.runtime.tracking import GeneralTracker
from orc.runtime.utils import extract_model_from_parallel, send_to_device

logger = get_logger(__name__)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Printing(GeneralTracker):
    name = "printing"
    requires_logging_directory = False

    @property
    def tracker(self) -> Printing:
        return self


def loaders(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1)), batch_size=batch_size, shuffle=True)


@find_executable_batch_size(starting_batch_size=4)
def train(batch_size: int, steps: int) -> float:
    accelerator = Accelerator(
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        dataloader_config=DataLoaderConfiguration(split_batches=False),
        project_config=ProjectConfiguration("project", total_limit=2),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True), InitProcessGroupKwargs()],
        log_with=Printing(),
    )
    set_seed(1)
    model: nn.Module = nn.Linear(2, 1)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
    scheduler: LRScheduler = LambdaLR(optimizer, lambda step: 1.0)
    loader = loaders(batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    total: float = 0.0
    for inputs, targets in skip_first_batches(loader, 1):
        with accelerator.accumulate(model), accelerator.autocast(AutocastKwargs(enabled=True)):
            loss: Tensor = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.log({"loss": loss.item(), "norm": float(norm) if norm is not None else 0.0}, step=1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        gathered: Tensor = accelerator.gather_for_metrics(loss.detach().reshape(1))
        total += float(gathered.mean())
    location: str = str(accelerator.save_state("project/y"))
    accelerator.load_state(location)
    state: dict[str, Any] = accelerator.get_state_dict(model)
    accelerator.save(state, "project/z", safe_serialization=True)
    if accelerator.is_main_process:
        accelerator.print(total, accelerator.process_index, accelerator.device.type)
    if accelerator.distributed_type == DistributedType.NO:
        logger.info("alone", main_process_only=True)
    with accelerator.main_process_first():
        pass
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    assert isinstance(unwrapped, nn.Module)
    accelerator.end_training()
    return total


def parts() -> Iterator[str]:
    state = PartialState()
    with state.split_between_processes(["a", "b"], apply_padding=True) as mine:
        yield from mine
    index: int = AcceleratorState().process_index + GradientState().num_steps
    yield str(index)


def big(checkpoint: str) -> nn.Module:
    with init_empty_weights():
        model = nn.Linear(2, 2)
    placed = infer_auto_device_map(model, max_memory={0: "1GB", "cpu": 10**9})
    dispatched: nn.Module = load_checkpoint_and_dispatch(model, checkpoint, device_map=placed)
    return dispatch_model(extract_model_from_parallel(dispatched), device_map={"": "cpu"})


total: float = train(3)
names: list[str] = gather_object(["a"])
batch: dict[str, Tensor] = send_to_device({"a": torch.zeros(1)}, "cpu")
shard = FullyShardedDataParallelPlugin(fsdp_version=2)
notebook_launcher(train, args=(1,), num_processes=1)
print(runtime.utils.set_seed, runtime.state.PartialState, shard.fsdp_version)
