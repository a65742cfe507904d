"""Accumulate gradients: one optimizer step for several batches, as if they had been one large batch.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu --gradient-accumulation-steps 4 train.py

The number of batches is a setting (`runtime.gradient_accumulation_steps` in job.yaml), not code. Within
`accumulate` the optimizer steps, and the processes exchange gradients, on the last batch of each window only.

Expected: test accuracy >= 0.95
"""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, set_seed


def datasets():
    """455 tumours to learn from and 114 to test on: 30 measurements each, benign (1) or malignant (0)."""
    data = load_breast_cancer()
    inputs, labels = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:455], order[455:]
    inputs = (inputs - inputs[train].mean(dim=0)) / inputs[train].std(dim=0)
    return TensorDataset(inputs[train], labels[train]), TensorDataset(inputs[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8, help="per process and batch, not per optimizer step")
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    accelerator = Accelerator()  # takes gradient_accumulation_steps from the job, or from `orc launch`
    set_seed(0)
    train_set, test_set = datasets()
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    batches = steps = 0
    for _ in range(args.epochs):
        for inputs, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)  # divides by the number of batches in a window
                optimizer.step()  # does nothing until the window is complete,
                optimizer.zero_grad()  # and neither does this
            batches += 1
            steps += accelerator.sync_gradients  # true on the batch that completes a window, and on an epoch's last
    accelerator.print(f"{batches} batches per process, {steps} optimizer steps")

    model.eval()
    correct = total = 0
    for inputs, labels in test_loader:
        with torch.no_grad():
            guesses = model(inputs).argmax(dim=1)
        guesses, truth = accelerator.gather_for_metrics((guesses, labels))
        correct, total = correct + int((guesses == truth).sum()), total + len(truth)
    accelerator.print(f"test accuracy {correct / total:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
