"""Reading pickled states: tensors, plain values and NumPy arrays of such. Nothing that is read can run code."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# The codes of all kinds of elements but objects and records.
_ELEMENTS = "?bhilqBHILQefdgFDGSUMm"
_CAN_ALLOW = hasattr(torch.serialization, "safe_globals")  # not torch 2.4


def read(file: Any, map_location: Any = None, *, mmap: bool = False) -> Any:
    """Return the object that `torch.save` has written to *file*."""
    with _arrays():
        return torch.load(file, map_location=map_location, mmap=mmap, weights_only=True)


def is_array(value: Any) -> bool:
    """Return whether *value* is a NumPy array that `read` can load."""
    kind = type(value)
    return _CAN_ALLOW and kind.__module__ == "numpy" and kind.__name__ == "ndarray" and value.dtype.char in _ELEMENTS


def _arrays() -> AbstractContextManager[Any]:
    """A block in which torch's safe loader takes arrays too."""
    try:
        import numpy as np
    except ImportError:
        return nullcontext()
    if not _CAN_ALLOW:
        return nullcontext()
    rebuild = np.empty(0).__reduce__()[0]
    # An empty array holds empty bytes, which are pickled as a call of their class.
    wanted: list[Any] = [np.ndarray, np.dtype, rebuild, bytes, *{type(np.dtype(code)) for code in _ELEMENTS}]
    known = torch.serialization.get_safe_globals()  # what the script has allowed stays so afterwards
    return torch.serialization.safe_globals([kind for kind in wanted if kind not in known])
