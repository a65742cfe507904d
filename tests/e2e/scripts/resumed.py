"""Train; be preempted in the middle of an epoch; go on from there on another number of processes."""

import argparse
import os
import signal
import time

import torch
from tasks import Report, classifier, points
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, DataLoaderConfiguration, ProjectConfiguration

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--project", required=True)
parser.add_argument("--preempt-at", type=int, help="a SIGTERM comes after so many steps of this run")
args = parser.parse_args()

accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(split_batches=True),
    project_config=ProjectConfiguration(project_dir=args.project, automatic_checkpoint_naming=True),
)
report = Report(args.out, accelerator.process_index)
data = points(400, seed=1)
numbered = TensorDataset(torch.arange(400), *data.tensors)
shuffle = torch.Generator().manual_seed(7)
model = classifier()
model[2] = torch.nn.Identity()  # dropout is drawn per process, so it has no meaning across numbers of processes
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
loader = DataLoader(numbered, batch_size=8, shuffle=True, generator=shuffle)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

resumed = accelerator.resume()
begin = step = resumed.step if resumed else 0
for epoch in range(resumed.epoch if resumed else 0, 2):
    for samples, inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        report(step=step, epoch=epoch, world=accelerator.num_processes, samples=samples.tolist(), loss=loss.item())
        if args.preempt_at is not None and step >= begin + args.preempt_at:
            if step == begin + args.preempt_at and accelerator.is_last_process:
                os.kill(os.getpid(), signal.SIGTERM)  # one rank is told, all leave after the same step
            time.sleep(0.4)  # the ranks agree on a step within a second; there must be steps left in this epoch
accelerator.end_training()
