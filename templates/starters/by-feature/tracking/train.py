"""Log to experiment trackers: one of your own in fifteen lines, and any that are installed.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py --log-with tensorboard

All processes make the same calls, and only the main process writes. Names of trackers: tensorboard, wandb, mlflow,
comet_ml, aim, clearml, dvclive, swanlab, trackio, or `all` for the installed ones. Their keys go into `secrets:` of
job.yaml (WANDB_API_KEY).

Expected: test accuracy >= 0.95
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, GeneralTracker, on_main_process, set_seed


class JSONLines(GeneralTracker):
    """A tracker that appends every call as a line to a file."""

    name = "json_lines"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, path):
        super().__init__()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (until `finish`)

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values):
        print(json.dumps({"config": values}), file=self.file)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        print(json.dumps({"step": step, **{key: float(value) for key, value in values.items()}}), file=self.file)

    @on_main_process
    def finish(self):
        self.file.close()


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
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--log-with", nargs="*", default=[], help="further trackers, by name")
    args = parser.parse_args()

    accelerator = Accelerator(log_with=[JSONLines("logs/metrics.jsonl"), *args.log_with], project_dir="logs")
    accelerator.init_trackers("tumours", config={"epochs": args.epochs, "lr": args.lr})
    set_seed(0)
    train_set, test_set = datasets()
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, batch_size=16, shuffle=True), DataLoader(test_set, batch_size=64)
    )

    for epoch in range(args.epochs):
        losses, hits = [], []
        for inputs, labels in train_loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        model.eval()
        for inputs, labels in test_loader:
            with torch.no_grad():
                hits.append(accelerator.gather_for_metrics(model(inputs).argmax(dim=1) == labels))
        model.train()
        # The mean over all processes, not the main process's own: only that one is written.
        loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        accuracy = torch.cat(hits).float().mean().item()
        accelerator.log({"loss": loss, "accuracy": accuracy}, step=epoch)
    accelerator.print(f"test accuracy {accuracy:.4f}")
    accelerator.end_training()  # finishes the trackers, too


if __name__ == "__main__":
    main()
