"""Train on pods of a Kubernetes cluster.

    ORC_CLUSTERS=clusters.yaml orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py                        # the same script on this machine

A job that is preempted, or whose time is over, saves its state before it ends; the next attempt goes on from there.

Expected: test accuracy >= 0.92
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, set_seed


def datasets():
    """1,437 digits of 8 x 8 pixels to learn from and 360 to test on."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=24, help="per process")
    args = parser.parse_args()

    accelerator = Accelerator(project_dir="runs")
    set_seed(0)
    train_set, test_set = datasets()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    resumed = accelerator.resume()
    if resumed:
        accelerator.print(f"resumed from {resumed.path}")

    for epoch in range(resumed.epoch if resumed else 0, args.epochs):
        for pixels, labels in train_loader:
            loss = nn.functional.cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}  loss {mean:.4f}")
        accelerator.save_state()

    model.eval()
    hits = []
    for pixels, labels in test_loader:
        with torch.no_grad():
            hits.append(accelerator.gather_for_metrics(model(pixels).argmax(dim=1) == labels))
    accelerator.print(f"test accuracy {torch.cat(hits).float().mean().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
