"""Doubles of libraries that compute in fp8 on NVIDIA GPUs only: they record how they are called, and compute as torch.

Their functions, arguments and defaults are those of the documentations of Transformer Engine and MS-AMP.
"""

import contextlib
import dataclasses
import enum
import importlib.machinery
import sys
import types

import cloudpickle
import pytest
import torch
from torch import nn

from orc.runtime.parallel.precision.fp8 import FP8


def module(name, **content):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="a double")
    made.__path__ = []
    vars(made).update(content)
    return made


def compute_on_cpus(monkeypatch):
    """Let a double compute on the CPU, where the library would refuse to."""
    monkeypatch.setattr(FP8, "requires", lambda self, ctx: None)


@pytest.fixture
def on_a_gpu(monkeypatch):
    compute_on_cpus(monkeypatch)


@pytest.fixture
def transformer_engine(monkeypatch):
    return put_transformer_engine(monkeypatch)


@pytest.fixture
def on_ranks():
    """`put_transformer_engine`, for functions that run on ranks."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield put_transformer_engine
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def put_transformer_engine(monkeypatch):
    """The calls that the double of Transformer Engine has got: ``fp8_autocast`` as pairs of enabled and recipe."""
    compute_on_cpus(monkeypatch)
    calls = types.SimpleNamespace(autocast=[], active=[], layers=[], in_fp8=[])

    class Layer(nn.Module):
        def get_extra_state(self):
            return torch.ones(3, dtype=torch.uint8)

        def set_extra_state(self, state):
            pass

    class Linear(Layer):
        def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
            super().__init__()
            calls.layers.append(("Linear", in_features, out_features, bias, params_dtype))
            self.in_features, self.out_features = in_features, out_features
            self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None

        def forward(self, inputs):
            calls.in_fp8.append(bool(calls.active and calls.active[-1]))
            return nn.functional.linear(inputs, self.weight, self.bias)

    class LayerNorm(Layer):
        def __init__(self, normalized_shape, eps=1e-5, params_dtype=None, device="cuda"):
            super().__init__()
            calls.layers.append(("LayerNorm", normalized_shape, eps, params_dtype))
            self.eps = eps
            self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device))
            self.bias = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device))

        def forward(self, inputs):
            return nn.functional.layer_norm(inputs, self.weight.shape, self.weight, self.bias, self.eps)

    class TransformerLayer(nn.Module):
        pass

    @contextlib.contextmanager
    def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None):
        calls.autocast.append((enabled, fp8_recipe))
        calls.active.append(enabled)
        yield
        calls.active.pop()

    class Format(enum.Enum):
        E4M3, E5M2, HYBRID = "e4m3", "e5m2", "hybrid"

    @dataclasses.dataclass
    class DelayedScaling:
        margin: int = 0
        fp8_format: Format = Format.HYBRID
        amax_history_len: int = 1024
        amax_compute_algo: str = "max"
        scaling_factor_compute_algo: object = None

    @dataclasses.dataclass
    class MXFP8BlockScaling:
        fp8_format: Format = Format.E4M3

    recipe = module("transformer_engine.common.recipe", Format=Format, DelayedScaling=DelayedScaling,
                    MXFP8BlockScaling=MXFP8BlockScaling)  # fmt: skip
    pytorch = module("transformer_engine.pytorch", Linear=Linear, LayerNorm=LayerNorm, fp8_autocast=fp8_autocast,
                     TransformerLayer=TransformerLayer)  # fmt: skip
    common = module("transformer_engine.common", recipe=recipe)
    whole = module("transformer_engine", pytorch=pytorch, common=common)
    for one in (recipe, pytorch, common, whole):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    calls.te, calls.recipe = pytorch, recipe
    return calls


@pytest.fixture
def msamp(monkeypatch, on_a_gpu):
    """The levels with which the double of MS-AMP was asked to replace a model and its optimizer."""
    levels = []

    class FP8Linear(nn.Linear):
        pass

    class LBAdamW(torch.optim.AdamW):
        pass

    def initialize(model, optimizer=None, opt_level="O1"):
        levels.append(opt_level)
        for name, child in list(model.named_children()):
            if type(child) is nn.Linear:
                new = FP8Linear(child.in_features, child.out_features)
                new.load_state_dict(child.state_dict())
                setattr(model, name, new)
        return model, LBAdamW(model.parameters(), lr=optimizer.param_groups[0]["lr"])

    monkeypatch.setitem(sys.modules, "msamp", module("msamp", initialize=initialize))
    return levels
