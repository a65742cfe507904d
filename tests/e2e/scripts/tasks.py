"""Data and models that the scripts and their reference share; everything here is drawn from fixed seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 3
VOCABULARY, PADDING = 11, 0


def points(count: int, seed: int) -> TensorDataset:
    """Points of three overlapping clouds, and which cloud each came from."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    centres = torch.tensor([[0.0, 2.0, 0.0, 1.0], [2.0, 0.0, 1.0, 0.0], [-1.0, -1.0, 2.0, 2.0]])
    return TensorDataset(centres[labels] + torch.randn(count, 4, generator=generator), labels)


def classifier() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))


def sentences(count: int) -> list[Tensor]:
    """Sequences of 2 to 20 tokens, in which each token mostly follows from the one before."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for length in torch.randint(2, 21, (count,), generator=generator).tolist():
        start, noise = torch.randint(1, VOCABULARY, (2, length), generator=generator)
        result.append((torch.arange(length) * 3 + start[0] + (noise == 1)) % (VOCABULARY - 1) + 1)
    return result


def padded(batch: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PADDING)


class NextToken(nn.Module):
    """Scores of the next token: (batch, length) -> (batch, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.letters, self.cell = nn.Embedding(VOCABULARY, 8), nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(self.letters(tokens))[0])
        return out


def summed_loss(scores: Tensor, batch: Tensor) -> Tensor:
    """Cross entropy of the next token, summed over the tokens that are not padding."""
    targets = batch[:, 1:]
    return nn.functional.cross_entropy(
        scores.reshape(-1, VOCABULARY), targets.reshape(-1), ignore_index=PADDING, reduction="sum"
    )


def targets_in(batch: Tensor) -> int:
    return int((batch[:, 1:] != PADDING).sum())


class Report:
    """JSON lines of one rank; floats are written exactly."""

    def __init__(self, directory: str, rank: int) -> None:
        self.path = Path(directory, f"rank-{rank}.jsonl")

    def __call__(self, **values: Any) -> None:
        exact = {key: value.hex() if isinstance(value, float) else value for key, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(exact) + "\n")
