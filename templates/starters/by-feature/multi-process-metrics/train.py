"""Compute metrics over all processes, on every sample exactly once.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py

Every process gets as many batches as the others, so the last ones repeat samples where the number does not divide.
`gather` gives these too; `gather_for_metrics` leaves them out, and its result goes straight to any library of metrics.

Expected: macro F1 >= 0.92
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, set_seed


def datasets():
    """1,436 digits of 8 x 8 pixels to learn from and 361 to test on, which two processes cannot share evenly."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1436], order[1436:]
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    train_set, test_set = datasets()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(test_set, batch_size=32)
    )
    for _ in range(args.epochs):
        for pixels, labels in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(pixels), labels))
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    guesses, truth, verdicts, with_repetitions = [], [], [], 0
    for pixels, labels in test_loader:
        with torch.no_grad():
            guess = model(pixels).argmax(dim=1)
        with_repetitions += len(accelerator.gather(labels))
        # One call for all that belongs together: tensors of any nesting ...
        all_guesses, all_labels = accelerator.gather_for_metrics((guess, labels))
        guesses.append(all_guesses)
        truth.append(all_labels)
        # ... and for what is no tensor.
        words = ["right" if hit else "wrong" for hit in guess == labels]
        verdicts += accelerator.gather_for_metrics(words, use_gather_object=True)
    guesses, truth = torch.cat(guesses).cpu(), torch.cat(truth).cpu()

    accelerator.print(f"{with_repetitions} with gather, {len(truth)} with gather_for_metrics, {len(verdicts)} verdicts")
    accelerator.print(f"{verdicts.count('wrong')} wrong")
    accelerator.print(f"macro F1 {f1_score(truth, guesses, average='macro'):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
