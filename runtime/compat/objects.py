"""Small helpers of scripts for models, mappings and this machine."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the items of *source* into *destination*, mappings into mappings; returns *destination*."""
    for key, value in source.items():
        if isinstance(value, dict):
            inner = destination.get(key)
            destination[key] = merge_dicts(value, inner if isinstance(inner, dict) else {})
        else:
            destination[key] = value
    return destination


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a server listens on TCP *port* of this machine; by default 29500, the usual ``MASTER_PORT``."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("localhost", int(port) if port is not None else 29500)) == 0


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function; that of its class for another object.

    Args:
        obj: any object.
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return ``recursive_getattr(model, "encoder.layer")`` is ``model.encoder.layer``.

    Args:
        obj: the object to begin with.
        attr: names with dots between them.
    """
    return functools.reduce(getattr, attr.split("."), obj)


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether *module* is the result of ``torch.compile(model)``."""
    from torch._dynamo.eval_frame import OptimizedModule  # no public name

    return isinstance(module, OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module inside *module* is compiled: wrapped, or in place as regional compilation does it."""
    return any(
        is_compiled_module(inner) or inner._compiled_call_impl is not None
        for inner in module.modules()
        if inner is not module
    )


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether *model* has parameters that are distributed tensors (``DTensor``)."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return *state_dict* as safetensors holds it: tensors only, all contiguous, shared ones under their first name.

    Names that are left out are logged.
    """
    import logging

    kept: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}
    dropped: list[str] = []
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            continue
        # The meta device has no addresses: tensors there never count as shared.
        place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and not value.is_meta and place in seen:
            dropped.append(name)
            continue
        seen[place] = name
        kept[name] = value.contiguous()
    if dropped:
        logging.getLogger(__name__).warning(
            "shared tensors are saved once; left out: %s. Load with strict=False, or tie them again", ", ".join(dropped)
        )
    return kept


def check_os_kernel() -> None:
    """Warn on a Linux kernel before 5.5, with which distributed processes are known to hang."""
    import platform
    import re
    import warnings

    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    if platform.system() == "Linux" and match and (int(match[1]), int(match[2])) < (5, 5):
        warnings.warn(
            f"Linux kernel {release} is older than 5.5, the oldest recommended: processes may hang. Update the kernel",
            stacklevel=2,
        )


def convert_dict_to_env_variables(current_env: dict[str, Any]) -> list[str]:
    """Return ``KEY=value`` lines, each with a line break, for the items that are safe in an environment file.

    Items with a line break or another control character, or a name that is none, are left out with a warning.

    Args:
        current_env: names and values.
    """
    import re
    import warnings

    lines = []
    for key, value in current_env.items():
        if re.fullmatch(r"\w+", key) and not re.search(r"[\n\r;\x00]", str(value)):
            lines.append(f"{key}={value}\n")
        else:
            warnings.warn(f"{key!r} is left out: its name or value cannot stand in an environment file", stacklevel=2)
    return lines
