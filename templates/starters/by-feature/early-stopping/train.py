"""Stop all processes together when one of them says so.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py

A process that leaves the loop alone leaves the others waiting for it. So it sets a trigger, and all of them ask at the
same place whether anybody has: `check_trigger` is true everywhere, once. Here the main process decides by the
validation loss; a process that meets a NaN, or its own time limit, would do the same.

Expected: test accuracy >= 0.95
"""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from orc.runtime import Accelerator, set_seed


def datasets():
    """341 tumours to learn from, 114 to decide when to stop and 114 to test on, 30 measurements each."""
    data = load_breast_cancer()
    inputs, labels = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    inputs = (inputs - inputs.mean(dim=0)) / inputs.std(dim=0)
    return random_split(TensorDataset(inputs, labels), [341, 114, 114], torch.Generator().manual_seed(0))


class Patience:
    """Count the epochs without a new best value."""

    def __init__(self, epochs):
        self.epochs, self.best, self.waited = epochs, float("inf"), 0

    def is_over(self, loss):
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited >= self.epochs


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Mean loss and accuracy over the whole loader."""
    model.eval()
    losses, hits = [], []
    for inputs, labels in loader:
        scores = model(inputs)
        each = nn.functional.cross_entropy(scores, labels, reduction="none")
        each, hit = accelerator.gather_for_metrics((each, scores.argmax(dim=1) == labels))
        losses.append(each)
        hits.append(hit.float())
    model.train()
    return torch.cat(losses).mean().item(), torch.cat(hits).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100, help="at most")
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better validation loss")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_set, valid_set, test_set = datasets()
    model, optimizer, train_loader, valid_loader, test_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_set, batch_size=16, shuffle=True),
        DataLoader(valid_set, batch_size=64),
        DataLoader(test_set, batch_size=64),
    )

    patience = Patience(args.patience)
    for epoch in range(args.epochs):
        for inputs, labels in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        loss, _ = evaluate(accelerator, model, valid_loader)
        accelerator.print(f"epoch {epoch + 1:3d}  validation loss {loss:.4f}")
        if accelerator.is_main_process and patience.is_over(loss):
            accelerator.set_trigger()
        if accelerator.check_trigger():  # on all processes, whoever has set it
            print(f"process {accelerator.process_index} stops after epoch {epoch + 1}")
            break
    accelerator.print(f"test accuracy {evaluate(accelerator, model, test_loader)[1]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
