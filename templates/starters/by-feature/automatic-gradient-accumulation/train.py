"""Keep the number of samples per optimizer step, whatever batch fits into memory.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py

The batch size is found as in the starter `automatic-batch-size`; what it lacks to `--samples-per-step` is accumulated.
The result is then that of the large batch, on small devices too. `--pretend-memory` makes a CPU run out of memory.

Expected: test accuracy >= 0.93
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, find_executable_batch_size, set_seed


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
    parser.add_argument("--samples-per-step", type=int, default=128, help="on all processes together")
    parser.add_argument("--pretend-memory", type=int, metavar="SAMPLES", help="run out of memory above this many")
    args = parser.parse_args()

    accelerator = Accelerator()
    train_set, test_set = datasets()
    steps_taken = 0

    # Halves divide the number of samples per step; nine tenths, the default, would not.
    @find_executable_batch_size(
        starting_batch_size=args.samples_per_step // accelerator.num_processes,
        reduce_batch_size_fn=lambda size: size // 2,
    )
    def train(batch_size):
        nonlocal steps_taken
        accelerator.free_memory()
        # What one batch on each process lacks to the wanted number of samples, further batches bring.
        window = args.samples_per_step // (batch_size * accelerator.num_processes)
        accelerator.gradient_accumulation_steps = window
        accelerator.print(f"trying batch size {batch_size}, {window} batches per optimizer step")
        set_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
        train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True)
        test_loader = DataLoader(test_set, batch_size=batch_size)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
        steps_taken = 0
        for _ in range(args.epochs):
            for pixels, labels in train_loader:
                if args.pretend_memory and len(labels) > args.pretend_memory:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(pixels), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                steps_taken += accelerator.sync_gradients
        model.eval()
        hits = []
        for pixels, labels in test_loader:
            with torch.no_grad():
                hits.append(accelerator.gather_for_metrics(model(pixels).argmax(dim=1) == labels))
        return torch.cat(hits).float().mean().item()

    accuracy = train()
    accelerator.print(f"{steps_taken} optimizer steps")
    accelerator.print(f"test accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
