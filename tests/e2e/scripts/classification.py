"""Train a classifier and measure its accuracy on an evaluation set that does not divide by the number of processes."""

import argparse

import torch
from tasks import Report, classifier, points
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from orc.runtime import Accelerator, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

accelerator = Accelerator(cpu=True)
report = Report(args.out, accelerator.process_index)
set_seed(42, device_specific=True)
train, evaluation = points(96, seed=1), points(53, seed=2)
shuffle = torch.Generator().manual_seed(7)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = LambdaLR(optimizer, lambda step: 1 - step / 100)
model, optimizer, scheduler, loader, eval_loader = accelerator.prepare(
    model,
    optimizer,
    scheduler,
    DataLoader(train, batch_size=8, shuffle=True, generator=shuffle),
    DataLoader(evaluation, batch_size=8),
)
set_seed(42, device_specific=True)  # dropout differs from rank to rank
for epoch in range(3):
    model.train()
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report(loss=loss.item(), lr=scheduler.get_last_lr()[0])

    model.eval()
    correct = seen = 0
    with torch.no_grad():
        for inputs, labels in eval_loader:
            predictions, references = accelerator.gather_for_metrics((model(inputs).argmax(-1), labels))
            correct += int((predictions == references).sum())
            seen += len(references)
        inputs, labels = evaluation.tensors
        alone = (accelerator.unwrap_model(model)(inputs).argmax(-1) == labels).double().mean().item()
    report(epoch=epoch, accuracy=correct / seen, seen=seen, alone=alone)
accelerator.end_training()
