"""The same trainings in plain PyTorch: DistributedDataParallel and what one writes around it by hand.

python reference.py classification|tokens OUT
python reference.py resumed OUT 2:9 4:17 1:100     (processes : last step, one after the other)
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tasks import NextToken, Report, classifier, padded, points, sentences, summed_loss, targets_in
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, TensorDataset


class Every(Sampler[list[int]]):
    """Of the batches of *sampler*, those of one rank."""

    def __init__(self, sampler: BatchSampler, rank: int, world: int) -> None:
        self.sampler, self.rank, self.world = sampler, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        for index, batch in enumerate(self.sampler):
            if index % self.world == self.rank:
                yield batch


def seed(value: int) -> None:
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)


def classification(rank: int, world: int, out: str) -> None:
    report = Report(out, rank)
    train, evaluation = points(96, seed=1), points(53, seed=2)
    shuffle = torch.Generator().manual_seed(7)
    batches = Every(BatchSampler(RandomSampler(train, generator=shuffle), 8, False), rank, world)
    loader = DataLoader(train, batch_sampler=batches, generator=shuffle)
    eval_loader = DataLoader(evaluation, batch_size=8)
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 100)
    seed(42 + rank)
    for epoch in range(3):
        model.train()
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for _ in range(world):
                scheduler.step()
            optimizer.zero_grad()
            report(loss=loss.item(), lr=scheduler.get_last_lr()[0])
        model.eval()
        correct = 0
        with torch.no_grad():
            for inputs, labels in eval_loader:  # all of it on every rank
                correct += int((model.module(inputs).argmax(-1) == labels).sum())
        accuracy = correct / len(evaluation)
        report(epoch=epoch, accuracy=accuracy, seen=len(evaluation), alone=accuracy)


def tokens(rank: int, world: int, out: str) -> None:
    report = Report(out, rank)
    data = sentences(56)
    batches = Every(BatchSampler(SequentialSampler(data), 4, False), rank, world)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=padded)  # type: ignore[arg-type]
    model = DistributedDataParallel(NextToken())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(2):
        every = list(loader)
        for window in (every[start : start + 3] for start in range(0, len(every), 3)):
            count = torch.tensor(float(sum(targets_in(batch) for batch in window)), dtype=torch.float64)
            dist.all_reduce(count)
            # DDP averages over the processes; what is wanted is the sum over them, divided by all tokens.
            factor = world / count.item()
            for batch in window:
                last = batch is window[-1]
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = summed_loss(model(batch[:, :-1]), batch)
                    if last:
                        for parameter in model.parameters():
                            if parameter.grad is not None:
                                parameter.grad.mul_(factor)
                    (loss * factor if last else loss).backward()
                report(loss=loss.item(), tokens=targets_in(batch))
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.module.named_parameters():
        report(name=name, weights=[value.hex() for value in parameter.flatten().tolist()])


def resumed(rank: int, world: int, out: str, last: int) -> None:
    report = Report(out, rank)
    saved = Path(out, "saved.pt")
    numbered = TensorDataset(torch.arange(400), *points(400, seed=1).tensors)
    model = classifier()
    model[2] = torch.nn.Identity()  # type: ignore[operator]
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    done = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    shuffle = torch.Generator().manual_seed(7)
    loader = DataLoader(numbered, batch_size=8, shuffle=True, generator=shuffle)
    share = 8 // world
    step = 0
    for epoch in range(2):
        for batch in loader:
            step += 1
            if step <= done or step > last:
                continue
            samples, inputs, labels = (part[rank * share : (rank + 1) * share] for part in batch)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(step=step, epoch=epoch, world=world, samples=samples.tolist(), loss=loss.item())
    dist.barrier()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": last}, saved)


def one_rank(rank: int, world: int, port: int, train: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    train(rank, world, *args)
    dist.destroy_process_group()


def run(world: int, train: Callable[..., None], *args: Any) -> None:
    with socket.socket() as holder:  # nobody else is given the port; torch's store sets this option too
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        mp.start_processes(one_rank, (world, port, train, *args), nprocs=world, start_method="fork")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    task, out, *phases = sys.argv[1:]
    if task == "resumed":
        for phase in phases:
            world, last = map(int, phase.split(":"))
            run(world, resumed, out, last)
    else:
        run(2, {"classification": classification, "tokens": tokens}[task], out)
