"""Communicate less: every process trains alone, and the models are averaged every few steps (Local SGD).

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py

With slow networks between the machines this trains faster than an exchange of gradients on every step, for a model that
is nearly as good. `--local-sgd-steps 1` averages after each step.

Expected: test accuracy >= 0.93
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, LocalSGD, set_seed


def datasets():
    """1,437 digits of 8 x 8 pixels to learn from and 360 to test on."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


def spread(accelerator, model):
    """Return how far the processes' parameters are apart: 0 when all have the same model."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return (mine - accelerator.reduce(mine.clone(), reduction="mean")).abs().max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--local-sgd-steps", type=int, default=8, help="steps between two averages")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    train_set, test_set = datasets()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, batch_size=16, shuffle=True), DataLoader(test_set, batch_size=64)
    )

    widest = 0.0
    for _ in range(args.epochs):
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=args.local_sgd_steps) as local_sgd:
            for pixels, labels in train_loader:
                accelerator.backward(nn.functional.cross_entropy(model(pixels), labels))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()  # averages on every local_sgd_steps-th call
            widest = max(widest, spread(accelerator, model))
        # The block has averaged once more at its end: from here on all processes have the same model again.
    accelerator.print(f"processes apart by up to {widest:.5f} within, {spread(accelerator, model):.5f} at the end")

    model.eval()
    hits = []
    for pixels, labels in test_loader:
        with torch.no_grad():
            hits.append(accelerator.gather_for_metrics(model(pixels).argmax(dim=1) == labels))
    accelerator.print(f"test accuracy {torch.cat(hits).float().mean().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
