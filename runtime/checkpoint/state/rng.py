"""The state of every random number generator of a process, as plain values and tensors."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from orc.runtime.core.compute import Compute


def capture(compute: Compute | None = None, device: torch.device | None = None) -> dict[str, Any]:
    """Python's, NumPy's (if installed), torch's and the accelerators' generators; *compute*'s where it has one.

    Of the GPUs it is that of *device*, which this process uses: the others are its peers'.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": (version, tuple(internal), gauss), "torch": torch.get_rng_state()}
    try:
        import numpy as np
    except ImportError:
        pass
    else:
        legacy: tuple[Any, ...] = tuple(np.random.get_state(legacy=True))
        name, keys, position, has_gauss, cached = legacy
        state["numpy"] = (
            str(name),
            torch.from_numpy(keys.astype("int64")),
            int(position),
            int(has_gauss),
            float(cached),
        )
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    if compute is not None and (own := compute.rng_state()) is not None:
        state[_key(compute)] = own
    return state


def restore(state: Mapping[str, Any], device: torch.device, compute: Compute | None = None) -> None:
    """Put every generator of *state* where it was.

    Raises:
        CheckpointError: a generator cannot be restored; training would go on with other random numbers. The one of a
            GPU, which another kind of machine does not have, is seeded anew instead, with a warning.
    """
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy as np

            name, keys, position, has_gauss, cached = state["numpy"]
            np.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
        if device.type == "cuda":
            _restore_cuda(state, device)
        if "mps" in state and torch.backends.mps.is_available():
            torch.mps.set_rng_state(state["mps"])
        if compute is not None and compute.rng_state() is not None:
            if _key(compute) not in state:
                raise CheckpointError(f"it was saved without {compute.library}")
            compute.set_rng_state(state[_key(compute)])
    except CheckpointError:
        raise
    except Exception as error:  # a state may hold anything
        raise CheckpointError(f"random number generators cannot be restored: {error}") from error


def _restore_cuda(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generator of *device* where that of this process's device was, or seed it as the CPU's is."""
    try:
        if "cuda" not in state:
            raise ValueError("it was saved without a GPU")
        torch.cuda.set_rng_state(state["cuda"], device)
    except (RuntimeError, TypeError, ValueError) as error:
        warnings.warn(
            f"the random numbers on {device} begin anew, with a seed that the CPU's generator gives: what was saved "
            f"does not fit ({error})",
            stacklevel=2,
        )
        digest = hashlib.sha256(state["torch"].numpy().tobytes() + str(device.index or 0).encode()).digest()
        with torch.cuda.device(device):
            torch.cuda.manual_seed(int.from_bytes(digest[:4], "big"))


def _key(compute: Compute) -> str:
    return compute.library.removeprefix("torch_")


def reseed(checkpoint_id: str, rank: int) -> None:
    """Seeds for a rank that did not exist when the checkpoint was written: a function of checkpoint and rank."""
    from orc.runtime.train.seeding import set_seed

    set_seed(int.from_bytes(hashlib.sha256(f"{checkpoint_id}/{rank}".encode()).digest()[:4], "big"))
