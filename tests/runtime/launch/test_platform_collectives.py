"""A platform's own library for collectives takes NCCL's place, where it is asked for and there."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from orc.runtime.core.errors import LaunchError
from orc.runtime.launch.device import COLLECTIVES, platform_backend

NAMES = ("smdistributed", "smdistributed.dataparallel", "smdistributed.dataparallel.torch")
LIBRARY = f"{NAMES[-1]}.torch_smddp"


def test_without_a_wish_the_backend_is_what_suits_the_device() -> None:
    assert platform_backend("nccl", {}) == "cpu:gloo,cuda:nccl"
    assert platform_backend("gloo", {}) == "gloo"


def test_the_library_serves_gpus_and_gloo_the_rest(monkeypatch) -> None:
    for name in (*NAMES, LIBRARY):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert platform_backend("nccl", {COLLECTIVES: "smddp"}) == "cpu:gloo,cuda:smddp"
    assert platform_backend("gloo", {COLLECTIVES: "smddp"}) == "gloo"


def test_a_library_that_is_not_there_is_named_with_what_to_do(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "smdistributed", None)
    with pytest.raises(LaunchError, match="not in this image"):
        platform_backend("nccl", {COLLECTIVES: "smddp"})
    with pytest.raises(LaunchError, match="ORC_COLLECTIVES=hccl"):
        platform_backend("nccl", {COLLECTIVES: "hccl"})
