"""Option objects of the kinds of parallelism, as fields of a `ParallelismConfig`. Torch-free.

What is not given comes from ``PARALLELISM_CONFIG_*`` variables, and is the documented default otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orc.runtime.core.config import ConfigError
from orc.runtime.core.parallelism_settings import PARSERS, size
from orc.runtime.core.parsing import truth


def setting(given: Any, variable: str, default: Any, parse: Callable[[Any], Any], field: str) -> Any:
    """Return *given*, parsed; without it the environment's value in *variable*, else *default*.

    Raises:
        ConfigError: the value cannot be used; it names *field* or *variable*.
    """
    value, source = (os.environ.get(variable), variable) if given is None else (given, field)
    if value is None:
        return default
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{source}={value!r}: {error}") from None


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism (``ParallelismConfig(tp_handler=...)``).

    Attributes:
        enable_async_tp: let ``torch.compile`` overlap the exchanges with the products around them; for models that are
            compiled, on GPUs. Else ``PARALLELISM_CONFIG_ENABLE_ASYNC_TP``.
        plan: how each module is cut, by its name, in which ``*`` stands for one level: a style by name (``colwise``,
            ``rowwise``, ...) or a ``ParallelStyle`` of torch. It takes the place of the model's own plan.

    Raises:
        ConfigError: a value cannot be used.
    """

    enable_async_tp: bool | None = None
    plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.enable_async_tp = setting(
            self.enable_async_tp, "PARALLELISM_CONFIG_ENABLE_ASYNC_TP", False, truth, "enable_async_tp"
        )
        if self.plan is not None and not isinstance(self.plan, Mapping):
            raise ConfigError(f"plan is a {type(self.plan).__name__}, not a mapping from names of modules to styles")


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism (``ParallelismConfig(cp_handler=...)``).

    Attributes:
        cp_comm_strategy: how keys and values travel: ``allgather`` (all at once) or ``alltoall`` (round the ring). Else
            ``PARALLELISM_CONFIG_CP_COMM_STRATEGY``.

    Raises:
        ConfigError: a value cannot be used.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        variable, parse = "PARALLELISM_CONFIG_CP_COMM_STRATEGY", PARSERS["cp_comm_strategy"]
        self.cp_comm_strategy = setting(self.cp_comm_strategy, variable, "allgather", parse, "cp_comm_strategy")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism by attention heads (``ParallelismConfig(sp_handler=...)``).

    Attributes:
        sp_seq_length: the length of all sequences; not needed where it varies. Else
            ``PARALLELISM_CONFIG_SP_SEQ_LENGTH``.
        sp_seq_length_is_variable: the length varies from batch to batch. Else
            ``PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE``.
        sp_attn_implementation: attention that each process computes over whole sequences: ``sdpa``,
            ``flash_attention_2`` or ``flash_attention_3``. Else ``PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION``.

    Raises:
        ConfigError: a value cannot be used, or the length neither varies nor is given.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        prefix = "PARALLELISM_CONFIG_SP_"
        self.sp_seq_length = setting(self.sp_seq_length, f"{prefix}SEQ_LENGTH", None, size, "sp_seq_length")
        self.sp_seq_length_is_variable = setting(
            self.sp_seq_length_is_variable, f"{prefix}SEQ_LENGTH_IS_VARIABLE", True, truth, "sp_seq_length_is_variable"
        )
        self.sp_attn_implementation = setting(
            self.sp_attn_implementation,
            f"{prefix}ATTN_IMPLEMENTATION",
            "sdpa",
            PARSERS["sp_attn_implementation"],
            "sp_attn_implementation",
        )
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigError("sp_seq_length_is_variable=False needs the length: give sp_seq_length too")


@dataclass
class TorchTensorParallelPlugin:
    """Older form of ``ParallelismConfig(tp_size=...)`` (``Accelerator(torch_tp_plugin=...)``).

    Attributes:
        tp_size: processes that share the matrices of each layer.
        torch_device_mesh: a mesh of the script's own, instead.

    Raises:
        ConfigError: *tp_size* is no whole number of at least 1.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        try:
            self.tp_size = size(self.tp_size)
        except ValueError as error:
            raise ConfigError(f"TorchTensorParallelPlugin: tp_size={self.tp_size!r}: {error}") from None
