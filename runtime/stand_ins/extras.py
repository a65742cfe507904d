"""Small names that libraries import from Accelerate and scripts do not: constants, look-ups in models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn

from orc.runtime.compat.basic_config import default_config_folder
from orc.runtime.core import fsdp_settings
from orc.runtime.core.availability import is_peft_available

FSDP_SHARDING_STRATEGY = list(fsdp_settings.STRATEGIES)
FSDP_AUTO_WRAP_POLICY = list(fsdp_settings.WRAP_POLICIES)
FSDP_BACKWARD_PREFETCH = list(fsdp_settings.PREFETCHES)
FSDP_STATE_DICT_TYPE = list(fsdp_settings.STATE_DICT_TYPES)

default_config_file = str(default_config_folder(os.environ) / "default_config.yaml")


class CustomDtype(Enum):
    """Data types that torch does not have, as quantizing libraries name them."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


def is_peft_model(model: Any) -> bool:
    """Return whether *model*, without the wrappers of training, is a model of peft."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    from orc.runtime.parallel import extract_model_from_parallel

    bare = extract_model_from_parallel(model) if isinstance(model, nn.Module) else model
    return isinstance(bare, PeftModel)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called *name* of *module* or of a module in it; `None` where there is none."""
    return next((type(one) for one in module.modules() if type(one).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Return the parameters of *modules*, moved to *device*.

    Args:
        modules: modules of *model*, or a regular expression that their whole names match.
        model: where names are looked up.
        device: where the parameters are to be.
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.to(device).parameters()}
