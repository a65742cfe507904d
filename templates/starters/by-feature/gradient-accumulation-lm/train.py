"""Accumulate gradients of a language model, whose batches hold different numbers of tokens.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu --gradient-accumulation-steps 4 train.py

The mean of the batches' mean losses is not the mean over all tokens: a batch of short lines would weigh as much as one
of long lines. So each loss here is a sum, and `backward(..., normalize_by=tokens)` divides by the number of tokens of
the whole window on all processes. Two processes with four batches of 8 lines then give what one process gives with one
batch of 64: `orc launch --cpu train.py --batch-size 64` prints the same figure.

Expected: loss per token <= 3.0
"""

import argparse
from pydoc_data.topics import topics  # the language reference, as help("topics") shows it

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from orc.runtime import Accelerator, set_seed

PADDING = -100  # what cross_entropy ignores


def lines(count):
    """The first *count* lines of the reference with 20 to 78 characters, as tensors of character numbers."""
    text = "\n".join(topics[name] for name in sorted(topics))
    chosen = [line.strip() for line in text.splitlines() if 20 <= len(line.strip()) <= 78 and line.isascii()][:count]
    return [torch.tensor([ord(letter) for letter in line]) for line in chosen]


def collate(batch):
    """Inputs padded with 0, and targets (the next character) padded with what the loss ignores."""
    inputs = pad_sequence([line[:-1] for line in batch], batch_first=True)
    targets = pad_sequence([line[1:] for line in batch], batch_first=True, padding_value=PADDING)
    return inputs, targets


class Reader(nn.Module):
    """Characters in, scores for the next one out."""

    def __init__(self, width):
        super().__init__()
        self.letter, self.memory = nn.Embedding(128, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, letters):
        return self.head(self.memory(self.letter(letters))[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="lines per process and batch")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    model = Reader(48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(lines(640), batch_size=args.batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        total = torch.zeros(2, device=accelerator.device)  # sum of the losses, number of tokens
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                scores = model(inputs).transpose(1, 2)
                loss = nn.functional.cross_entropy(scores, targets, ignore_index=PADDING, reduction="sum")
                tokens = (targets != PADDING).sum()
                accelerator.backward(loss, normalize_by=tokens)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.stack([loss.detach(), tokens])
        loss_sum, token_sum = accelerator.reduce(total).tolist()
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}  loss per token {loss_sum / token_sum:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
