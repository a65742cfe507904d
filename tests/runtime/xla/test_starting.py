"""When a process computes through torch_xla, and what it refuses."""

from __future__ import annotations

import json

import pytest

from orc.runtime.core.errors import LaunchError
from orc.runtime.launch import xla


def who():
    import torch.distributed as dist
    import torch_xla

    from orc.runtime import Accelerator

    accelerator = Accelerator()
    state = accelerator.state
    return {
        "type": str(state.distributed_type),
        "backend": state.backend,
        "rank": accelerator.process_index,
        "local": accelerator.local_process_index,
        "size": accelerator.num_processes,
        "control": dist.get_backend() if dist.is_initialized() else None,
        "calls": torch_xla.CALLS[:2],
    }


def refused():
    from orc.runtime import Accelerator
    from orc.runtime.core.errors import LaunchError

    try:
        Accelerator()
    except LaunchError as error:
        return str(error)
    return None


def test_processes_meet_through_torch_xla_before_they_touch_the_device(xla_ranks):
    first, second = xla_ranks(2, who)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert {(one["type"], one["backend"], one["size"], one["control"]) for one in (first, second)} == {
        ("XLA", "xla", 2, "gloo")
    }
    assert first["calls"] == [("xla://", "launched by torchrun or orc"), ("device",)]


def test_ranks_are_the_ordinals_of_xla_whatever_the_launcher_counts(xla_ranks):
    first, second = xla_ranks(2, who, env={"FAKE_XLA_REVERSED": "1"})
    assert [(one["rank"], one["local"]) for one in (first, second)] == [(1, 0), (0, 1)]


def test_a_single_process_needs_no_process_group(xla_ranks):
    (only,) = xla_ranks(1, who)
    assert (only["type"], only["backend"], only["size"], only["control"]) == ("XLA", None, 1, None)


def test_processes_that_torch_xla_has_launched_itself_are_known_to_it(xla_ranks):
    def launched_by_torch_xla():
        import os

        os.environ["FAKE_XLA_RANK"] = os.environ["RANK"]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            del os.environ[name]
        return who()

    found = xla_ranks(2, launched_by_torch_xla, env={"FAKE_XLA_WORLD": "2"})
    assert [(one["rank"], one["local"], one["size"], one["type"]) for one in found] == [
        (0, 0, 2, "XLA"),
        (1, 1, 2, "XLA"),
    ]


def test_a_world_of_another_size_than_was_launched_is_refused(xla_ranks):
    for text in xla_ranks(2, refused, env={"FAKE_XLA_WORLD": "1"}):
        assert text.startswith(
            "torch_xla's world is of size 1, but 2 process(es) were launched: what each of them has would not be added "
            "up; one process for each chip needs `launcher: xla`"
        )


def test_several_processes_on_the_cpu_are_refused_before_they_meet(xla_ranks):
    for text in xla_ranks(2, refused, env={"PJRT_DEVICE": "CPU"}):
        assert text.startswith("2 processes were launched with PJRT_DEVICE=CPU: on the CPU torch_xla does not add up")


def test_spmd_is_refused(xla_ranks):
    (text,) = xla_ranks(1, refused, env={"XLA_USE_SPMD": "1"})
    assert text.startswith("SPMD mode of torch_xla is on")


def test_who_asks_for_the_cpu_gets_it(xla_ranks):
    def on_cpu():
        import sys

        from orc.runtime import Accelerator

        accelerator = Accelerator(cpu=True)
        return str(accelerator.distributed_type), "torch_xla" in sys.modules

    assert xla_ranks(1, on_cpu) == [("NO", False)]


def test_where_torch_xla_is_asked_for_but_not_installed_that_is_said(run_ranks):
    (text,) = run_ranks(1, refused, env={"PJRT_DEVICE": "TPU"})
    assert text.startswith("PJRT_DEVICE=TPU asks for PyTorch/XLA, but torch_xla is not installed")


def test_a_torch_xla_for_another_torch_is_named(tmp_path, monkeypatch):
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN5torch4lazy')")
    (tmp_path / "torch_xla-2.9.0.dist-info").mkdir()
    (tmp_path / "torch_xla-2.9.0.dist-info" / "METADATA").write_text("Name: torch_xla\nVersion: 2.9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LaunchError, match=r"torch_xla 2\.9\.0 cannot be loaded beside torch .*undefined symbol"):
        xla.load()


def test_the_tests_torch_xla_takes_what_the_real_one_takes(xla_ranks):
    from pathlib import Path

    recorded = json.loads(Path(__file__).with_name("recorded.json").read_text())

    def signatures(names):
        import importlib
        import inspect

        found = {}
        for name in names:
            module, _, function = name.rpartition(".")
            parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()
            found[name] = [[one.name, "" if one.default is one.empty else repr(one.default)] for one in parameters]
        return found

    assert xla_ranks(1, signatures, list(recorded["signatures"])) == [recorded["signatures"]]
