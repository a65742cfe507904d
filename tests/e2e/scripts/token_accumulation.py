"""Accumulate gradients over batches of sequences of varying length, so that every token weighs the same."""

import argparse

import torch
from tasks import NextToken, Report, padded, sentences, summed_loss, targets_in
from torch.utils.data import DataLoader

from orc.runtime import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
report = Report(args.out, accelerator.process_index)
model = NextToken()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
# 14 batches of 4 for 2 processes: windows of 3, 3 and 1.
loader = DataLoader(sentences(56), batch_size=4, collate_fn=padded)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = summed_loss(model(batch[:, :-1]), batch)
            accelerator.backward(loss, normalize_by=targets_in(batch))
            optimizer.step()
            optimizer.zero_grad()
        report(loss=loss.item(), tokens=targets_in(batch))
for name, parameter in accelerator.unwrap_model(model).named_parameters():
    report(name=name, weights=[value.hex() for value in parameter.flatten().tolist()])
accelerator.end_training()
