"""Save and resume: model, optimizer, schedule, random numbers, the place in the data, and an object of one's own.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py --epochs 2 && orc launch -n 2 --cpu train.py --epochs 6    # goes on after epoch 2

A run in two parts ends with exactly the figure of a run in one: nothing is seen twice, and nothing is left out.

Expected: test error <= 0.75
"""

import argparse

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, ProjectConfiguration, set_seed


def datasets():
    """353 patients to learn from and 89 to test on: 10 measurements each, and how the disease went on in a year."""
    data = load_diabetes()
    inputs, targets = torch.tensor(data.data, dtype=torch.float32) * 20, torch.tensor(data.target, dtype=torch.float32)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, test = order[:353], order[353:]
    targets = ((targets - targets[train].mean()) / targets[train].std()).unsqueeze(1)  # an error of 1 is a bare guess
    return TensorDataset(inputs[train], targets[train]), TensorDataset(inputs[test], targets[test])


class BestError:
    """Anything with these two methods can be a part of the checkpoints."""

    value = float("inf")

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--total-epochs", type=int, default=6, help="length of the schedule")
    args = parser.parse_args()

    # In a job, checkpoints go where checkpoint.dir says and checkpoint.keep of them stay. Without one these count.
    project = ProjectConfiguration(project_dir="runs", automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    train_set, test_set = datasets()
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, epochs=args.total_epochs, steps_per_epoch=23)
    model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, test_loader, schedule
    )
    best = BestError()
    accelerator.register_for_checkpointing(best)

    resumed = accelerator.resume()  # loads the newest complete checkpoint; None when there is none
    first = 0
    if resumed:
        first = resumed.epoch
        accelerator.print(f"resumed from {resumed.path} after epoch {first}, best so far {best.value:.4f}")

    for epoch in range(first, args.epochs):
        for inputs, targets in train_loader:  # after a resume it begins where the checkpoint was made
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        errors = []
        for inputs, targets in test_loader:
            with torch.no_grad():
                errors.append(accelerator.gather_for_metrics((model(inputs) - targets) ** 2))
        model.train()
        error = torch.cat(errors).mean().item()
        best.value = min(best.value, error)
        accelerator.print(f"epoch {epoch + 1:2d}/{args.epochs}  test error {error:.4f}")
        accelerator.save_state()  # a new directory checkpoint_<n>, complete or not there at all
    accelerator.print(f"best error {best.value:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
