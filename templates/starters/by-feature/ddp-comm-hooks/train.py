"""Compress gradients on their way between the processes with a DDP communication hook.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py --hook power_sgd

`fp16` and `bf16` send half of the bytes; `power_sgd` sends two thin matrices instead of each large one. `no` is what
happens without a hook. The wrapper casts what another hook sends: `--hook power_sgd --wrapper bf16`.

Expected: test accuracy >= 0.93
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed


def datasets():
    """1,437 digits of 8 x 8 pixels to learn from and 360 to test on."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--hook", default="bf16", choices=[hook.value for hook in DDPCommunicationHookType])
    parser.add_argument("--wrapper", default="no", choices=["no", "fp16", "bf16"])
    args = parser.parse_args()

    options = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(args.hook),
        comm_wrapper=DDPCommunicationHookType(args.wrapper),
        # PowerSGD begins with whole gradients, while they still change a lot.
        comm_state_option={"matrix_approximation_rank": 2, "start_powerSGD_iter": 20} if "sgd" in args.hook else {},
    )
    accelerator = Accelerator(kwargs_handlers=[options])
    set_seed(0)
    train_set, test_set = datasets()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(test_set, batch_size=64)
    )
    for epoch in range(args.epochs):
        for pixels, labels in train_loader:
            loss = nn.functional.cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}  loss {accelerator.reduce(loss.detach(), 'mean'):.6f}")

    model.eval()
    hits = []
    for pixels, labels in test_loader:
        with torch.no_grad():
            hits.append(accelerator.gather_for_metrics(model(pixels).argmax(dim=1) == labels))
    accelerator.print(f"{args.hook}: test accuracy {torch.cat(hits).float().mean().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
