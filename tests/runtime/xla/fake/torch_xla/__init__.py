"""The public functions of torch_xla that the runtime calls, over gloo and on the CPU: every call is noted in `CALLS`.

Signatures are those of torch_xla 2.9 (``../../recorded.json``, which ``tests/testbed/xla`` records from a real one).
Like the real one it gives a model that moves new parameters.
"""

import os

import torch

CALLS = []
torch.__future__.set_overwrite_module_params_on_conversion(True)


def note(name, *details):
    """One more call."""
    CALLS.append((name, *details))


def device(index=None):
    note("device")
    return torch.device("cpu")


def sync(wait=False, reset_scope=True):
    note("sync")


def world():
    """What this "runtime" has been set up for; a test may say something else than what was launched."""
    return int(os.environ.get("FAKE_XLA_WORLD") or os.environ.get("WORLD_SIZE") or 1)


def ordinal():
    """The place of this process. A test may reverse them: XLA's order is its own."""
    rank = int(os.environ.get("FAKE_XLA_RANK") or os.environ.get("RANK") or 0)
    return world() - 1 - rank if os.environ.get("FAKE_XLA_REVERSED") else rank
