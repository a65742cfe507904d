"""In which order an epoch visits the samples, the same on all ranks, and what must be remembered to do so again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import RandomSampler

from orc.runtime.data.plan import PositionError
from orc.runtime.data.position import Key, Share
from orc.runtime.data.samplers import SeedableRandomSampler

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

Indices = npt.NDArray[np.int64]


def permutation(sampler: RandomSampler, generator: torch.Generator) -> Indices:
    """Return what *sampler* would yield from *generator*."""
    n, wanted = len(sampler.data_source), sampler.num_samples
    if sampler.replacement:
        # torch draws in pieces of 32, and one last piece that may be empty
        sizes = [32] * (wanted // 32) + [wanted % 32]
        parts = [torch.randint(n, (size,), dtype=torch.int64, generator=generator) for size in sizes]
    elif wanted == n:
        parts = [torch.randperm(n, generator=generator)]
    else:
        parts = [torch.randperm(n, generator=generator) for _ in range(wanted // n)]
        parts.append(torch.randperm(n, generator=generator)[: wanted % n])
    whole: Indices = (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy()
    return whole


class Order:
    """An order of samples, *length* in each epoch; this one is 0, 1, 2, ...

    A *key* is all that determines one epoch's order; it survives in checkpoints.
    """

    kind = "sequential"

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def draw(self, epoch: int, share: Share) -> Key:
        """The key of a new epoch, the same on all ranks: *share* replaces a tensor by rank 0's."""
        return {"kind": self.kind}

    def indices(self, key: Mapping[str, Any]) -> Indices | None:
        """The whole order for *key*; `None` means 0, 1, 2, ...: a range needs no memory."""
        return None

    def finish(self) -> None:
        """All of the order is taken: what it is drawn from goes to where the next begins."""


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def share_in(context: RunContext, *, simulated: bool = False) -> Share:
    """A function that gives every rank of *context* rank 0's CPU tensor; what it gets where there are no peers."""
    return _same if context.world_size == 1 or simulated else FromFirst(context)


@dataclass(frozen=True)
class FromFirst:
    """A `Share` that gives every rank of *context* rank 0's CPU tensor."""

    context: RunContext

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's *tensor*."""
        import torch.distributed as dist

        shared = tensor.clone()
        dist.broadcast(shared, src=0, group=self.context.control_group("aligning random number generators"))
        return shared


class ShuffledOrder(Order):
    """The order that `torch.utils.data.RandomSampler` would yield on rank 0, agreed on by all ranks.

    Draws exactly what the sampler would draw, from the same generator, so that on one process the order equals the
    unprepared loader's for the same seed.
    """

    kind = "shuffled"

    def __init__(self, sampler: RandomSampler) -> None:
        super().__init__(sampler.num_samples)
        self.sampler = sampler
        self._drawn: tuple[Key, Indices] | None = None
        self._after: torch.Tensor | None = None  # where the sampler's generator stands behind the order

    def draw(self, epoch: int, share: Share) -> Key:
        """The state of the sampler's generator, or a seed from torch's own where it has none."""
        generator = self.sampler.generator
        if generator is None:
            seed = share(torch.empty((), dtype=torch.int64).random_())
            return {"kind": self.kind, "seed": int(seed.item())}
        state = share(generator.get_state())
        generator.set_state(state)
        key: Key = {"kind": self.kind, "state": state.clone()}
        self._drawn = key, self._take(generator)  # kept instead of drawn twice
        return key

    def _take(self, generator: torch.Generator) -> Indices:
        """Draw the order from *generator*. The draw with which the sampler ends is left for `finish`, as the sampler
        leaves it out in a pass that is left early.
        """
        order = permutation(self.sampler, generator)
        begun = generator.get_state()
        if len(order) == len(self.sampler.data_source) and not self.sampler.replacement:
            torch.randperm(len(order), generator=generator)
        self._after = generator.get_state()
        generator.set_state(begun)
        return order

    def indices(self, key: Mapping[str, Any]) -> Indices | None:
        """The permutation (or the draws with replacement) that *key* stands for."""
        drawn, self._drawn = self._drawn, None
        if drawn is not None and drawn[0] is key:
            return drawn[1]
        generator = torch.Generator()
        if "seed" in key:
            generator.manual_seed(key["seed"])
        else:
            generator.set_state(key["state"])
            return self._take(generator)
        return permutation(self.sampler, generator)

    def finish(self) -> None:
        """Let the sampler's generator stand where the sampler leaves it at its end."""
        if self._after is not None and self.sampler.generator is not None:
            self.sampler.generator.set_state(self._after)


class SeededOrder(Order):
    """The order that `SeedableRandomSampler` yields: a function of its seed and the epoch alone."""

    kind = "seeded"

    def __init__(self, sampler: SeedableRandomSampler) -> None:
        super().__init__(sampler.num_samples)
        self.sampler = sampler

    def draw(self, epoch: int, share: Share) -> Key:
        """Rank 0's seed and the epoch."""
        seed = self.sampler.initial_seed
        if seed >= 2**63:  # torch's own first seed has 64 bits; a generator takes it as a negative number as well
            seed -= 2**64
        shared = share(torch.tensor(seed, dtype=torch.int64))
        return {"kind": self.kind, "seed": int(shared.item()), "epoch": epoch}

    def indices(self, key: Mapping[str, Any]) -> Indices | None:
        """The permutation of ``seed + epoch``."""
        return permutation(self.sampler, torch.Generator().manual_seed(key["seed"] + key["epoch"]))


def check_key(order: Order, key: Mapping[str, Any]) -> None:
    """Raise `PositionError` when *key* was drawn by another kind of order."""
    if key.get("kind") != order.kind:
        raise PositionError(
            f"saved from a {key.get('kind')} order of samples, this loader's is {order.kind}: give it the same "
            "shuffle or sampler as when the checkpoint was written"
        )
