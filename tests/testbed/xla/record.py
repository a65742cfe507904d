"""Prints what a real torch_xla takes, to which the fake one of the tests is held (``tests/runtime/xla/recorded.json``).

Run by ``up.sh``, with the Python of its environment.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys

import torch
import torch_xla

FUNCTIONS = {
    "torch_xla": "device sync",
    "torch_xla.core.xla_model": "mark_step all_reduce all_gather collective_broadcast broadcast_master_param "
    "reduce_gradients optimizer_step set_rng_state get_rng_state",
    "torch_xla.runtime": "world_size global_ordinal local_ordinal local_process_count host_index device_type is_spmd",
}


def signatures() -> dict[str, list[list[str]]]:
    """Names and defaults of the arguments of all functions that the runtime calls."""
    found = {}
    for module, names in FUNCTIONS.items():
        for name in names.split():
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
            found[f"{module}.{name}"] = [
                [one.name, "" if one.default is one.empty else repr(one.default)] for one in parameters
            ]
    return found


def new_parameters() -> bool:
    """Whether a model that moves gets new parameters."""
    model = torch.nn.Linear(1, 1)
    before = model.weight
    return model.to(torch_xla.device()).weight is not before


if __name__ == "__main__":
    record = {
        "torch_xla": torch_xla.__version__,
        "torch": torch.__version__,
        "moving gives new parameters": new_parameters(),
        "signatures": signatures(),
    }
    json.dump(record, sys.stdout, indent=1)
    sys.stdout.write("\n")
