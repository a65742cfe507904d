"""The library DeepSpeed, imported when it is needed and restricted to what this platform can do."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from orc.runtime.core.availability import compare_versions

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext

_OLDEST = "0.6.5"


@cache
def deepspeed() -> Any:
    """Return the module `deepspeed`.

    Raises:
        ImportError: it is not installed, is too old, or cannot be imported; the text says what to do.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError("training with DeepSpeed needs the package deepspeed: pip install deepspeed")
    try:
        import deepspeed as module
    except Exception as error:
        raise ImportError(
            f"the package deepspeed is installed but cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not compare_versions("deepspeed", ">=", _OLDEST):
        raise ImportError(f"deepspeed {module.__version__} is too old: {_OLDEST} or later is needed")
    _without_compiling(module)
    # Newer releases of torch rename collectives, of which every single call by DeepSpeed would tell the user.
    warnings.filterwarnings("ignore", r"(?s).*torch\.distributed\.\w+` is deprecated", FutureWarning)
    return module


def is_engine(model: object) -> bool:
    """Return whether *model* is an engine of DeepSpeed, which has the model that the script wrote inside."""
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)  # another thread may be loading it
    return kind is not None and isinstance(model, kind)


def _without_compiling(module: Any) -> None:
    """On CPUs DeepSpeed compiles a kernel for collectives at its start, a minute long; gloo does the same work."""
    if module.accelerator.get_accelerator().device_name() != "cpu" or os.environ.get("DS_BUILD_SHM_COMM") == "1":
        return
    compatible = getattr(module.ops, "__compatible_ops__", None)
    if isinstance(compatible, dict):
        for name in ("deepspeed_shm_comm", "shm_comm"):
            if name in compatible:
                compatible[name] = False


def refuse_unusable(zero: Mapping[str, Any]) -> None:
    """Raise `ValueError` for what *zero*, the section ``zero_optimization``, requests and this machine cannot do."""
    accelerator = deepspeed().accelerator.get_accelerator()
    quantized = sorted(name for name, value in zero.items() if name.startswith("zero_quantized_") and value is True)
    if quantized and accelerator.device_name() == "cpu":
        raise ValueError(f"{', '.join(quantized)}: DeepSpeed quantizes on GPUs alone, and there is none; leave it out")
    on_disk = [name for name in ("offload_optimizer", "offload_param") if _device(zero.get(name)) == "nvme"]
    # Without this it would compile for minutes and then fail.
    if on_disk and not accelerator.create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        raise ValueError(
            f"{' and '.join(on_disk)} to nvme: DeepSpeed cannot build its async_io here, which needs a compiler and "
            "the headers of libaio (the package libaio-dev, or libaio-devel)"
        )


def _device(section: Any) -> Any:
    return section.get("device") if isinstance(section, Mapping) else None


def open_group_of_one(ctx: RunContext) -> None:
    """Open the process group that DeepSpeed needs even where there is one process and no launcher."""
    import torch.distributed as dist

    if ctx.world_size > 1:
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads its device there, whoever has opened the group
    if dist.is_initialized():
        return
    backend = "nccl" if ctx.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def sharded_construction(config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a block in which the parameters of new modules are sharded at once (``deepspeed.zero.Init``)."""
    return deepspeed().zero.Init(config_dict_or_path=dict(config))  # type: ignore[no-any-return]


@contextmanager
def unsharded_construction() -> Iterator[None]:
    """Construct modules whole inside the block, whatever is around it."""
    if "deepspeed" not in sys.modules:
        yield
        return
    from deepspeed.runtime.zero import partition_parameters

    if getattr(partition_parameters, "zero_init_context", None):
        partition_parameters.shutdown_init_context()
        try:
            yield
        finally:
            partition_parameters.restore_init_context()
    else:
        yield


def set_leaf_modules(model: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """Make ZeRO-3 gather each module of *classes* as one."""
    deepspeed()
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, list(classes))


def tell_transformers(config: Any) -> None:
    """Give Transformers, where it is installed, the configuration *config* for sharded construction, or `None`."""
    if config is None and "transformers" not in sys.modules:
        return  # it has never been told anything
    try:
        if importlib.util.find_spec("transformers") is None:
            return
    except ValueError:  # a stand-in without a spec
        return
    from transformers.integrations import deepspeed as integration

    if config is None:
        integration.unset_hf_deepspeed_config()
    else:
        integration.set_hf_deepspeed_config(config)
