"""Loaders of Megatron-LM's indexed datasets: documents of tokens in one binary file, with an index beside it.

The files are read by megatron-core, which maps them into memory. Which tokens make a sample is computed here from the
seed, alike on every process; nothing is written beside the data, and no cache of indices is read from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

SPLITS = ("train", "valid", "test")
_KNOWN = ("data_path", "splits_string", "seq_length", "micro_batch_size", "seed")


def open_loaders(
    arguments: Mapping[str, Any], *, rows: int, seq_length: int, seed: int, place: int, copies: int, begin: Any
) -> list[IndexedLoader | None]:
    """Return the loaders for training, validation and test; `None` for a split without documents.

    Args:
        arguments: of the placeholder.
        rows: samples of one batch on this process.
        seq_length: tokens of a sample, where *arguments* do not say it.
        seed: the same on every process.
        place: of this process among the *copies* of the model.
        copies: how many there are.
        begin: samples that each split has given already; `None` is none.

    Raises:
        ValueError: arguments that cannot be followed, or no such files.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if unknown := [name for name in arguments if name not in _KNOWN]:
        raise ValueError(f"MegatronLMDummyDataLoader: nothing takes {unknown[0]!r}; expected {', '.join(_KNOWN)}")
    path = arguments.get("data_path")
    if isinstance(path, (list, tuple)) and len(path) == 1:
        (path,) = path
    if not isinstance(path, (str, Path)):
        raise ValueError(f"MegatronLMDummyDataLoader(data_path={path!r}): expected the path of one dataset")
    for end in (".bin", ".idx"):
        if not Path(f"{path}{end}").is_file():
            raise ValueError(f"MegatronLMDummyDataLoader(data_path={str(path)!r}): there is no file {path}{end}")
    length = int(arguments.get("seq_length") or seq_length)
    documents = IndexedDataset(str(path))
    seed = int(arguments.get("seed", seed))
    loaders: list[IndexedLoader | None] = []
    for number, share in enumerate(split(len(documents), str(arguments.get("splits_string", "969,30,1")))):
        windows = Windows(documents, share, length, seed + number) if len(share) else None
        done = 0 if begin is None else int(begin[number])
        full = windows is not None and windows.per_epoch > 0
        loaders.append(IndexedLoader(windows, rows, place, copies, done) if windows is not None and full else None)
    if loaders[0] is None:
        raise ValueError(f"MegatronLMDummyDataLoader: {path} has too few tokens to train on {length} at once")
    return loaders


def split(count: int, shares: str) -> list[range]:
    """Return which of *count* documents train, validate and test, by *shares* like ``969,30,1``.

    Raises:
        ValueError: *shares* are no such numbers.
    """
    try:
        parts = [float(one) for one in shares.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not 0 < len(parts) <= len(SPLITS) or min(parts) < 0 or not sum(parts):
        raise ValueError(f"splits_string={shares!r}: expected three numbers like 969,30,1")
    parts += [0.0] * (len(SPLITS) - len(parts))
    ends = [0, *(round(count * sum(parts[: place + 1]) / sum(parts)) for place in range(len(parts)))]
    return [range(begin, end) for begin, end in pairwise(ends)]


class Windows(Dataset[dict[str, Tensor]]):
    """Samples of so many tokens of documents that follow each other, in another order in each epoch.

    Args:
        documents: an indexed dataset.
        share: which of them.
        length: tokens of a sample.
        seed: of the orders.
    """

    def __init__(self, documents: Any, share: range, length: int, seed: int) -> None:
        self._documents, self._share, self._length, self._seed = documents, share, length, seed
        self._sizes = numpy.asarray(documents.sequence_lengths)[share.start : share.stop].astype(numpy.int64)
        self.per_epoch = max(0, (int(self._sizes.sum()) - 1) // length)
        self._epoch = -1

    def _begin(self, epoch: int) -> None:
        drawn = numpy.random.default_rng((self._seed, epoch))
        self._order = drawn.permutation(len(self._sizes))
        self._ends = self._sizes[self._order].cumsum()
        self._windows = drawn.permutation(self.per_epoch)
        self._epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            self._begin(epoch)
        begin = int(self._windows[place]) * self._length
        parts, missing = [], self._length + 1
        number = int(numpy.searchsorted(self._ends, begin, side="right"))
        inside = begin - (int(self._ends[number - 1]) if number else 0)
        while missing:
            document = self._share.start + int(self._order[number])
            part = self._documents.get(
                document, offset=inside, length=min(missing, int(self._sizes[self._order[number]]) - inside)
            )
            parts.append(part)
            missing, number, inside = missing - len(part), number + 1, 0
        text = torch.from_numpy(numpy.concatenate(parts).astype(numpy.int64))
        return {"input_ids": text[:-1], "labels": text[1:], "loss_mask": torch.ones(self._length, dtype=torch.bool)}


class IndexedLoader:
    """Endless loader of a split: each batch has this process's samples of one optimizer step.

    Args:
        windows: the samples.
        rows: samples of a batch on this process.
        place: of this process among the *copies* of the model.
        copies: how many there are.
        consumed: samples that were given before, by all copies together.
    """

    def __init__(self, windows: Windows, rows: int, place: int, copies: int, consumed: int = 0) -> None:
        self.windows, self._rows, self._place, self._copies = windows, rows, place, copies
        self.consumed = consumed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        first = self.consumed + self._place * self._rows
        samples = [self.windows[first + row] for row in range(self._rows)]
        self.consumed += self._rows * self._copies
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def state_dict(self) -> dict[str, int]:
        """Return how many samples were given."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on after those of *state_dict*."""
        self.consumed = int(state_dict["consumed"])
