"""Availability of devices on this machine, and of optional packages and their versions in this installation.

A package is available when it can be imported from a real file: a folder of the same name in the working directory,
such as the ``wandb/`` that runs leave behind, does not count.
"""

from __future__ import annotations

import importlib.util
import operator
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

# ---- devices


def is_cuda_available() -> bool:
    """Return whether CUDA (or ROCm) is usable. Queries the driver, never initialises the device: forking stays safe."""
    import torch

    from orc.runtime.core.patching import patch_environment

    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return bool(torch.cuda.is_available())


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether Apple's Metal (MPS) is usable, with torch *min_version* or newer."""
    import torch

    return is_torch_version(">=", min_version) and torch.backends.mps.is_available() and torch.backends.mps.is_built()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether Intel GPUs are usable; *check_device* also requires that there is one."""
    return _device_module("xpu", check_device)


def _extension(name: str, package: str, what: str) -> Callable[..., bool]:
    def available(check_device: bool = False) -> bool:
        return is_package(package) and _device_module(name, check_device, package)

    available.__doc__ = f"""Return whether {what} are usable (needs ``{package}``).

    Args:
        check_device: also look whether there is a device.
    """
    return available


is_npu_available = _extension("npu", "torch_npu", "Ascend NPUs")
is_mlu_available = _extension("mlu", "torch_mlu", "Cambricon MLUs")
is_musa_available = _extension("musa", "torch_musa", "Moore Threads GPUs")
is_sdaa_available = _extension("sdaa", "torch_sdaa", "Tecorigin SDAA devices")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether Intel Gaudi is usable (needs ``habana_frameworks``); *init_hccl* also loads its collectives."""
    if not is_package("habana_frameworks.torch"):
        return False
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return _device_module("hpu", False, "habana_frameworks.torch.core")


def _device_module(name: str, check_device: bool, extension: str | None = None) -> bool:
    import torch

    if extension is not None:
        importlib.import_module(extension)
    module: Any = getattr(torch, name, None)
    if module is None or not module.is_available():
        return False
    if not check_device:
        return True
    try:
        return int(module.device_count()) > 0
    except RuntimeError:  # a driver without a device
        return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed; with a check, whether it computes on a TPU or a GPU.

    Args:
        check_is_tpu: also look whether the device is a TPU.
        check_is_gpu: also look whether the device is a GPU.

    Raises:
        ValueError: both checks at once.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu and check_is_gpu cannot both be asked for")
    if not is_package("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA", "ROCM")


def is_fp16_available() -> bool:
    """Return whether this process's device can train in float16: always `True`, torch supports it everywhere."""
    return True


def is_ccl_available() -> bool:
    """Return whether Intel's oneCCL bindings are installed."""
    return is_package("oneccl_bindings_for_pytorch") or is_package("torch_ccl")


def is_ipex_available() -> bool:
    """Return whether an Intel Extension for PyTorch for this torch (same major and minor version) is installed."""
    if not is_package("intel_extension_for_pytorch"):
        return False
    import importlib.metadata

    import torch

    extension = importlib.metadata.version("intel_extension_for_pytorch")
    return extension.split(".")[:2] == str(torch.__version__).split(".")[:2]


def is_fp8_available() -> bool:
    """Return whether a back end of 8-bit training is installed."""
    return is_transformer_engine_available() or is_torchao_available() or is_msamp_available()


# ---- packages


@cache
def is_package(name: str) -> bool:
    """Return whether the module *name* can be imported; imports nothing but the packages above it."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None) is not None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _package(name: str, what: str) -> Callable[[], bool]:
    def available() -> bool:
        return is_package(name)

    available.__doc__ = f"Return whether {what} is installed."
    return available


is_aim_available = _package("aim", "the tracker Aim")
is_bnb_available = _package("bitsandbytes", "bitsandbytes")
is_boto3_available = _package("boto3", "boto3")
is_clearml_available = _package("clearml", "the tracker ClearML")
is_comet_ml_available = _package("comet_ml", "the tracker Comet")
is_datasets_available = _package("datasets", "datasets")
is_deepspeed_available = _package("deepspeed", "DeepSpeed")
is_dvclive_available = _package("dvclive", "the tracker DVCLive")
is_lomo_available = _package("lomo_optim", "the LOMO optimizer")
is_matplotlib_available = _package("matplotlib", "matplotlib")
is_megatron_lm_available = _package("megatron", "Megatron-LM")
is_mlflow_available = _package("mlflow", "the tracker MLflow")
is_msamp_available = _package("msamp", "MS-AMP")
is_pandas_available = _package("pandas", "pandas")
is_peft_available = _package("peft", "PEFT")
is_pynvml_available = _package("pynvml", "NVIDIA's management library")
is_pytest_available = _package("pytest", "pytest")
is_rich_available = _package("rich", "rich")
is_sagemaker_available = _package("sagemaker", "the SageMaker SDK")
is_schedulefree_available = _package("schedulefree", "the schedule-free optimizers")
is_swanlab_available = _package("swanlab", "the tracker SwanLab")
is_timm_available = _package("timm", "timm")
is_torchao_available = _package("torchao", "torchao")
is_torchdata_available = _package("torchdata", "torchdata")
is_torchvision_available = _package("torchvision", "torchvision")
is_tqdm_available = _package("tqdm", "tqdm")
is_trackio_available = _package("trackio", "the tracker Trackio")
is_transformer_engine_available = _package("transformer_engine", "Transformer Engine")
is_transformers_available = _package("transformers", "transformers")
is_triton_available = _package("triton", "Triton")
is_wandb_available = _package("wandb", "the tracker Weights & Biases")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata with a `StatefulDataLoader` (0.8.0 and newer) is installed."""
    return is_torchdata_available() and compare_versions("torchdata", ">=", "0.8.0")


def require_stateful_dataloader() -> None:
    """Raise `ImportError` unless torchdata has a `StatefulDataLoader`."""
    if not is_torchdata_stateful_dataloader_available():
        raise ImportError(
            "use_stateful_dataloader=True needs the package torchdata, 0.8.0 or newer, in this environment: pip "
            "install 'torchdata>=0.8.0'. Without the option, prepared loaders have state_dict and load_state_dict "
            "too, and save_state and load_state keep their place"
        )


def is_tensorboard_available() -> bool:
    """Return whether TensorBoard's writer (``tensorboard`` or ``tensorboardX``) is installed."""
    return is_package("tensorboard") or is_package("tensorboardX")


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes with 4-bit support is installed."""
    return is_bnb_available() and compare_versions("bitsandbytes", ">=", "0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes with 8-bit support is installed."""
    return is_bnb_available() and compare_versions("bitsandbytes", ">=", "0.37.2")


def is_pippy_available() -> bool:
    """Return whether torch has pipelining (2.4 and newer)."""
    return is_package("torch.distributed.pipelining")


def is_weights_only_available() -> bool:
    """Return whether ``torch.load`` can be used with ``weights_only=True`` (torch 2.4 and newer)."""
    return is_torch_version(">=", "2.4.0")


# ---- versions

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Return whether ``library_or_version operation requirement_version`` holds, by the ordering of PEP 440.

    A local label (the ``+cpu`` of ``2.13.0+cpu``) counts only where the requirement has one too.

    Args:
        library_or_version: the name of an installed distribution, or a version.
        operation: ``>``, ``>=``, ``==``, ``!=``, ``<=`` or ``<``.
        requirement_version: the version to compare with.

    Raises:
        ValueError: another operation, or something that is no version.
        importlib.metadata.PackageNotFoundError: there is no such distribution.

    Example:
        >>> compare_versions("0.9.1", ">=", "0.10")
        False
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"`operation` must be one of {list(_OPERATIONS)}, received {operation}")
    required = str(requirement_version)
    version = str(library_or_version)
    if not _is_version(version):
        import importlib.metadata

        version = importlib.metadata.version(version)
    if "+" not in required:
        version = version.partition("+")[0]
    return _OPERATIONS[operation](_parse(version), _parse(required))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the torch of this process satisfies ``operation version``: ``is_torch_version(">=", "2.4")``."""
    import torch

    return compare_versions(str(torch.__version__), operation, version)


def _is_version(text: str) -> bool:
    return re.match(r"v?\d", text.strip()) is not None


@cache
def _parse(text: str) -> Any:
    # torch brings a full implementation of PEP 440 along; what it cannot read it would compare as text.
    from torch.torch_version import TorchVersion

    if not _is_version(text) or not re.fullmatch(r"[\w.!+-]+", text.strip()):
        raise ValueError(f"{text!r} is no version")
    return TorchVersion(text.strip())
