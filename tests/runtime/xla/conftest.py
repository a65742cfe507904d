"""Ranks that compute through a torch_xla of the tests: ``fake/`` has its public functions, over gloo on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import pytest

FAKE = Path(__file__).with_name("fake")


@pytest.fixture
def xla_ranks(run_ranks):
    """``xla_ranks(n, function, *args, env=None)``: as `run_ranks`, started as ``launcher: xla`` starts processes."""

    def run(world_size, function, *args, env=None):
        def start(function, *args):
            import sys

            from orc.runtime.core.availability import is_package

            sys.path.insert(0, str(fake))
            is_package.cache_clear()
            return function(*args)

        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        fake = str(FAKE)
        several = {"TORCHELASTIC_RUN_ID": "attempt"} if world_size > 1 else {}
        env = {"PJRT_DEVICE": "TPU", **several, **(env or {})}
        return run_ranks(world_size, start, function, *args, env=env, timeout=240)

    return run
