"""Classify scikit-learn's 1,797 handwritten digits (8 x 8 pixels) with a small network.

Run it with `orc submit job.yaml --follow`, with `orc launch -n 2 train.py`, or plainly with `python train.py`.

Expected: test accuracy >= 0.95
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator


def datasets():
    """1,437 digits to learn from and 360 to test on, pixels scaled to 0..1; the split is always the same."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(accelerator, model, loader):
    """The share of test digits classified correctly, over all processes."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        # The last batch is padded so that every process has one; gather_for_metrics drops the duplicates.
        guesses, truth = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
        correct += int((guesses == truth).sum())
        total += len(truth)
    model.train()
    return correct / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # Checkpoints go where the job says (ORC_CHECKPOINT_DIR), or to ./runs when there is no job.
    accelerator = Accelerator(project_dir="runs")
    torch.manual_seed(args.seed)
    train_set, test_set = datasets()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    # A job that was interrupted goes on where its newest checkpoint was made, in the middle of an epoch if need be.
    resumed = accelerator.resume()
    first_epoch = resumed.epoch if resumed else 0
    if resumed:
        accelerator.print(f"resumed from {resumed.path} in epoch {first_epoch + 1}, after step {resumed.step}")

    for epoch in range(first_epoch, args.epochs):
        losses = []
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        # A run that was saved with an epoch's last batch goes on with what follows it: nothing is left to train then.
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item() if losses else float("nan")
        score = accuracy(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch + 1:2d}/{args.epochs}  loss {mean_loss:.4f}  accuracy {score:.4f}")
        accelerator.save_state()

    accelerator.print(f"test accuracy {accuracy(accelerator, model, test_loader):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
