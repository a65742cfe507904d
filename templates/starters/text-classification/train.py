"""Tell which chapter of Python's language reference a passage is from: the smallest useful text classifier.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py
    python train.py

Expected: test accuracy >= 0.87
"""

import argparse
import random
import re
from pydoc_data.topics import topics  # the language reference, as help("topics") shows it

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from orc.runtime import Accelerator, set_seed

CHAPTERS = [["debugger"], ["compound"], ["string-methods", "formatstrings"]]
WORDS = 16  # at most, in a passage


def passages():
    """Return pairs of words and chapter number, 80 % to learn from and the rest to test on."""
    found = []
    for chapter, names in enumerate(CHAPTERS):
        words = re.findall(r"[a-z_]+", " ".join(topics[name] for name in names).lower())
        starts = range(0, len(words) - WORDS, WORDS)
        # Of different lengths, as sentences are: that is what the padding is for.
        found += [(words[start : start + WORDS - index % 5], chapter) for index, start in enumerate(starts)]
    random.Random(0).shuffle(found)
    cut = len(found) * 4 // 5
    return found[:cut], found[cut:]


class Collate:
    """Make a batch of the passages' word numbers: padded with 0 to the longest of this batch, not of all."""

    def __init__(self, vocabulary):
        self.number = {word: index + 2 for index, word in enumerate(vocabulary)}  # 0 is padding, 1 any other word

    def __call__(self, batch):
        rows = [torch.tensor([self.number.get(word, 1) for word in words]) for words, _ in batch]
        return pad_sequence(rows, batch_first=True), torch.tensor([chapter for _, chapter in batch])


class Classifier(nn.Module):
    """Mean of the words' vectors, then two layers."""

    def __init__(self, words, width, classes):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, rows):
        there = (rows != 0).sum(dim=1, keepdim=True)
        return self.head(self.words(rows).sum(dim=1) / there)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    train_set, test_set = passages()
    collate = Collate(sorted({word for words, _ in train_set for word in words}))
    model = Classifier(len(collate.number) + 2, 64, len(CHAPTERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, batch_size=64, collate_fn=collate)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(args.epochs):
        for rows, chapters in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(rows), chapters))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        hits = []
        for rows, chapters in test_loader:
            with torch.no_grad():
                hits.append(accelerator.gather_for_metrics(model(rows).argmax(dim=1) == chapters))
        model.train()
        accuracy = torch.cat(hits).float().mean().item()
        accelerator.print(f"epoch {epoch + 1:2d}/{args.epochs}  test accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
