"""The documented plug-in of sharded data parallelism."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from orc.runtime.core import fsdp_settings as settings
from orc.runtime.core.fsdp_settings import SETTINGS
from orc.runtime.core.parsing import truth
from orc.runtime.parallel.wrap_policy import class_policy, known_classes, size_policy

if TYPE_CHECKING:
    from torch import nn


_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "no": torch.float32,
}
_STATE_CONFIGS: dict[StateDictType, tuple[Callable[..., Any], Callable[..., Any]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_SIZE = 100_000_000  # parameters of a unit, torch's default


def _strategy(name: str) -> ShardingStrategy:
    return ShardingStrategy["_HYBRID_SHARD_ZERO2" if name == "HYBRID_SHARD_ZERO2" else name]


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of sharded data parallelism. What is not given comes from ``FSDP_*`` in the environment, else a default.

    Choices are taken by number, by name in any case or as torch's enum member; truth values also as text.

    Attributes:
        fsdp_version: 1 (`torch.distributed.fsdp.FullyShardedDataParallel`) or 2 (``fully_shard``).
        sharding_strategy: of version 1, and how version 2 reshards: 1 ``FULL_SHARD``, 2 ``SHARD_GRAD_OP``,
            3 ``NO_SHARD``, 4 ``HYBRID_SHARD``, 5 ``HYBRID_SHARD_ZERO2``.
        reshard_after_forward: version 2: free the gathered parameters after forward; also the number of ranks over
            which they stay sharded. Version 1: another name of the strategy.
        backward_prefetch: version 1: ``BACKWARD_PRE``, ``BACKWARD_POST`` or ``NO_PREFETCH``.
        mixed_precision_policy: torch's object, a precision (``bf16``), or a mapping with ``param_dtype``,
            ``reduce_dtype``, ...; by default that of the Accelerator's ``mixed_precision``.
        auto_wrap_policy: ``TRANSFORMER_BASED_WRAP``, ``SIZE_BASED_WRAP``, ``NO_WRAP`` or a function of torch's kind.
        cpu_offload: keep parameters and gradients in CPU memory; or torch's object.
        ignored_modules: modules, or a regular expression for their names, that stay whole on every rank.
        state_dict_type: ``FULL_STATE_DICT``, ``LOCAL_STATE_DICT`` or ``SHARDED_STATE_DICT``.
        state_dict_config: of torch; fits ``state_dict_type`` by default.
        optim_state_dict_config: the same for optimizers.
        limit_all_gathers: version 1: let the CPU wait before it gathers too far ahead.
        use_orig_params: version 1: keep the parameters of the model.
        param_init_fn: gives a module without values (``meta``) some, in place.
        sync_module_states: give every rank the parameters and buffers of rank 0. Version 2 does unless it is `False`.
        forward_prefetch: gather the next unit while this one computes.
        activation_checkpointing: recompute the activations of each unit in backward.
        cpu_ram_efficient_loading: only rank 0 has weights before the model is prepared; turns on sync_module_states.
        transformer_cls_names_to_wrap: names of the classes that ``TRANSFORMER_BASED_WRAP`` makes units.
        min_num_params: parameters of a unit with ``SIZE_BASED_WRAP``.

    Raises:
        ValueError: a value that there is not, or fields that contradict each other; the text names them.
    """

    fsdp_version: int | None = None
    sharding_strategy: str | int | ShardingStrategy | None = None
    reshard_after_forward: str | int | bool | ShardingStrategy | None = None
    backward_prefetch: str | int | BackwardPrefetch | None = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        around = settings.from_environment(os.environ)
        given = self._given(around.get("fsdp_version", 1))
        pair = {"sharding_strategy", "reshard_after_forward"}  # an argument puts aside the variable that means the same
        if pair & given.keys() or self.reshard_after_forward is not None:
            around = {name: value for name, value in around.items() if name not in pair}
        values = {**around, **given}
        try:
            settings.check_together(values)
        except ValueError as error:
            raise ValueError(f"FullyShardedDataParallelPlugin: {error}") from None
        self.fsdp_version = values.get("fsdp_version", 1)
        for name in ("use_orig_params", "forward_prefetch", "activation_checkpointing", "cpu_ram_efficient_loading"):
            setattr(self, name, values.get(name, False))
        self.sync_module_states = values.get("sync_module_states", self.fsdp_version == 2)
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            if "sync_module_states" in values:
                warnings.warn("cpu_ram_efficient_loading needs sync_module_states, which is now on", stacklevel=3)
            self.sync_module_states = True
        self.transformer_cls_names_to_wrap = values.get("transformer_cls_names_to_wrap")
        self.min_num_params = values.get("min_num_params")
        self._choose_sharding(values)
        name = values.get("backward_prefetch", "NO_PREFETCH")
        self.backward_prefetch = None if name == "NO_PREFETCH" else BackwardPrefetch[name]
        self._wrapping = "CUSTOM"
        if not callable(self.auto_wrap_policy) and not hasattr(self.auto_wrap_policy, "_run_policy"):
            self._wrapping = values.get("auto_wrap_policy", "NO_WRAP")
            self.auto_wrap_policy = None if self._wrapping == "NO_WRAP" else self._wrapping.lower()
        self.set_cpu_offload(self.cpu_offload if self.cpu_offload is not None else values.get("cpu_offload"))
        if isinstance(self.ignored_modules, str):
            re.compile(self.ignored_modules)
        default = "SHARDED_STATE_DICT" if self.fsdp_version == 2 else "FULL_STATE_DICT"
        self.set_state_dict_type(values.get("state_dict_type", default))
        policy, kind = self.mixed_precision_policy, self._policy_class()
        if isinstance(policy, str):
            self.set_mixed_precision(policy, override=True)
        elif isinstance(policy, dict):
            self.mixed_precision_policy = self._policy(policy)
        elif policy is not None and not isinstance(policy, kind):
            raise ValueError(
                f"FullyShardedDataParallelPlugin: mixed_precision_policy is a {type(policy).__name__}; version "
                f"{self.fsdp_version} takes torch's {kind.__name__}"
            )

    def _given(self, version: int) -> dict[str, Any]:
        """Return the parsed arguments that have a setting; objects of torch stay as they are."""
        given: dict[str, Any] = {}
        version = version if self.fsdp_version is None else settings.version(self.fsdp_version)
        for setting in SETTINGS.values():
            value = getattr(self, setting.field)
            objects = setting.field in ("auto_wrap_policy", "cpu_offload") and not isinstance(value, (str, int))
            size = setting.field == "reshard_after_forward" and type(value) is int and version == 2
            if value is None or objects or size:
                continue
            try:
                given[setting.field] = setting.parse(value)
            except ValueError as error:
                raise ValueError(f"FullyShardedDataParallelPlugin: {setting.field}={value!r}: {error}") from None
        return given

    def _choose_sharding(self, values: dict[str, Any]) -> None:
        named, after = values.get("sharding_strategy"), values.get("reshard_after_forward")
        if self.fsdp_version == 1:
            chosen = _strategy(named or after or "FULL_SHARD")
            self.sharding_strategy = self.reshard_after_forward = chosen
            return
        if type(self.reshard_after_forward) is not int:  # the number of ranks is passed on
            self.reshard_after_forward = after if after is not None else settings.reshards(named or "FULL_SHARD")
        self.sharding_strategy = None if named is None else _strategy(named)

    @property
    def hybrid(self) -> bool:
        """`True` if a strategy requests shards within a machine and replicas over the machines."""
        return self.sharding_strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    def set_cpu_offload(self, offload: Any = None) -> None:
        """Set ``cpu_offload`` to the object of this version: from a truth value, the other version's object or `None`.

        Args:
            offload: the new value; the one of the attribute unless given.

        Raises:
            ValueError: it is none of these.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        if isinstance(offload, CPUOffload):
            wanted = offload.offload_params
        elif isinstance(offload, OffloadPolicy):
            wanted = isinstance(offload, CPUOffloadPolicy)
        else:
            wanted = False if offload is None else truth(offload)
        if self.fsdp_version == 1:
            self.cpu_offload = offload if isinstance(offload, CPUOffload) else CPUOffload(offload_params=wanted)
        elif isinstance(offload, OffloadPolicy):
            self.cpu_offload = offload
        else:
            # Memory can only be pinned where there is an accelerator to copy from it.
            self.cpu_offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if wanted else OffloadPolicy()

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set the form of state dicts and, where they were not given or fit another form, its options.

        Args:
            state_dict_type: its name or enum; the one of the attribute unless given.

        Raises:
            ValueError: there is no such form, or version 2 does not have it.
        """
        if state_dict_type is None:
            state_dict_type = self.state_dict_type
        chosen = StateDictType[settings.state_dict_type(state_dict_type)]
        if self.fsdp_version == 2 and chosen is StateDictType.LOCAL_STATE_DICT:
            raise ValueError("LOCAL_STATE_DICT belongs to version 1; version 2 has FULL and SHARDED")
        self.state_dict_type = chosen
        model, optimizer = _STATE_CONFIGS[chosen]
        full = chosen is StateDictType.FULL_STATE_DICT
        options = {"offload_to_cpu": True, "rank0_only": True} if full else {"offload_to_cpu": True}
        if not isinstance(self.state_dict_config, model):  # type: ignore[arg-type]
            self.state_dict_config = model(**options)
        if not isinstance(self.optim_state_dict_config, optimizer):  # type: ignore[arg-type]
            self.optim_state_dict_config = optimizer(**options)

    def set_mixed_precision(self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the policy of a precision (``fp16``, ``bf16``, ``no``), unless there is one and not *override*.

        With *buffer_autocast* buffers get it, too (version 1); otherwise they stay float32.

        Args:
            mixed_precision: the precision.

        Raises:
            ValueError: there is no such precision.
        """
        if mixed_precision not in _DTYPES:
            raise ValueError(
                f"mixed precision {mixed_precision!r} is not one of {', '.join(_DTYPES)}; the plug-in takes torch's "
                "policy objects for others"
            )
        if self.mixed_precision_policy is not None and not override:
            return
        dtype = _DTYPES[mixed_precision]
        buffers = dtype if buffer_autocast else torch.float32
        self.mixed_precision_policy = self._policy(
            {"param_dtype": dtype, "reduce_dtype": dtype, "buffer_dtype": buffers}
        )

    def _policy_class(self) -> type[Any]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy

    def _policy(self, options: dict[str, Any]) -> Any:
        read: dict[str, Any] = {
            name: _DTYPES.get(value, value) if isinstance(value, str) else value
            for name, value in options.items()
            if self.fsdp_version == 1 or name != "buffer_dtype"
        }
        try:
            return self._policy_class()(**read)
        except TypeError as error:
            raise ValueError(f"FullyShardedDataParallelPlugin: mixed_precision_policy: {error}") from None

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Set ``auto_wrap_policy`` to a function that selects the units of *model*; `None` where there are none.

        The classes of ``TRANSFORMER_BASED_WRAP`` are those that were named, else ``_no_split_modules`` of *model*.

        Raises:
            ValueError: no classes are named, or *model* has no module of such a class.
        """
        if self._wrapping == "TRANSFORMER_BASED_WRAP":
            names = self.transformer_cls_names_to_wrap or list(getattr(model, "_no_split_modules", None) or ())
            if not names:
                raise ValueError(
                    "TRANSFORMER_BASED_WRAP: name the classes to wrap (transformer_cls_names_to_wrap, "
                    f"--fsdp-transformer-layer-cls-to-wrap); the model has {known_classes(model)}"
                )
            named = self.transformer_cls_names_to_wrap is not None
            self.auto_wrap_policy = class_policy(model, list(names), every=named)
        elif self._wrapping == "SIZE_BASED_WRAP":
            self.auto_wrap_policy = size_policy(_SIZE if self.min_num_params is None else self.min_num_params)
        elif self._wrapping == "NO_WRAP":
            self.auto_wrap_policy = None


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return the function that selects the units of *model* which FSDP 2 shards; `None` where only the whole is one.

    Args:
        fsdp2_plugin: the plug-in whose policy says which they are.
        model: the model, whose classes the policy names.

    Raises:
        ValueError: no classes are named, or *model* has no module of such a class.
    """
    from orc.runtime.parallel.wrap_policy import units

    fsdp2_plugin.set_auto_wrap_policy(model)
    if fsdp2_plugin.auto_wrap_policy is None:
        return None
    chosen = {id(unit) for unit in units(model, fsdp2_plugin.auto_wrap_policy) if unit is not model}
    return lambda module: id(module) in chosen


def enable_fsdp_ram_efficient_loading() -> None:
    """Let ``from_pretrained`` of Transformers load weights on rank 0 only; it holds for plug-ins made from now on.

    Transformers reads it in the environment, where it also looks for ``ACCELERATE_USE_FSDP``.
    """
    os.environ[SETTINGS["cpu_ram_efficient_loading"].variable] = "true"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let ``from_pretrained`` of Transformers load weights on every rank again."""
    os.environ[SETTINGS["cpu_ram_efficient_loading"].variable] = "false"
