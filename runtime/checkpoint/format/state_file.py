"""Files of states: pickles, of which nothing that is read can run code, and safetensors, checksummed while written.

The format of safetensors: eight bytes length, a JSON header of that length, then the tensors' bytes without gaps. The
library's own writer cannot checksum on the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.storage.durable import Hashing

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


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def without_aliases(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """*state* with each tensor once, and for every left-out name the name that holds its tensor (tied weights).

    Raises:
        CheckpointError: an entry is no tensor.
    """
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"the state of the model holds {name} of type {type(tensor).__name__}, which safetensors cannot store: "
                "pass safe_serialization=False"
            )
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        kept[name] = tensor
    return kept, aliases


def write_tensors(file: Hashing, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write *tensors* and *metadata*; tensors on other devices come over one by one."""
    # Wide types first keeps every tensor aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name} has dtype {tensor.dtype}, which safetensors cannot store")
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        if tensor.numel():
            file.write(tensor.view(-1).view(torch.uint8).numpy())
