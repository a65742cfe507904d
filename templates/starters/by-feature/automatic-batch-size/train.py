"""Find the largest batch size that fits into memory, instead of trying by hand.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py

`find_executable_batch_size` calls the function again with a smaller batch size when it runs out of memory: here half of
it, nine tenths of it without `reduce_batch_size_fn`. A CPU rarely does, so `--pretend-memory` fails as a GPU would when
a batch has more samples than that; drop it on real hardware.

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
    parser.add_argument("--batch-size", type=int, default=256, help="per process; what is tried first")
    parser.add_argument("--pretend-memory", type=int, metavar="SAMPLES", help="run out of memory above this many")
    args = parser.parse_args()

    accelerator = Accelerator()
    train_set, test_set = datasets()

    # All that holds memory of the device is made inside, so that a failed try leaves nothing behind.
    @find_executable_batch_size(starting_batch_size=args.batch_size, reduce_batch_size_fn=lambda size: size // 2)
    def train(batch_size):
        accelerator.print(f"trying batch size {batch_size}")
        accelerator.free_memory()  # forget what the last try has prepared
        set_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
        test_loader = DataLoader(test_set, batch_size=batch_size)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
        for _ in range(args.epochs):
            for pixels, labels in train_loader:
                if args.pretend_memory and len(labels) > args.pretend_memory:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
                loss = nn.functional.cross_entropy(model(pixels), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        hits = []
        for pixels, labels in test_loader:
            with torch.no_grad():
                hits.append(accelerator.gather_for_metrics(model(pixels).argmax(dim=1) == labels))
        return batch_size, torch.cat(hits).float().mean().item()

    batch_size, accuracy = train()  # without the batch size: the decorator gives it
    accelerator.print(f"batch size {batch_size}")
    accelerator.print(f"test accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
