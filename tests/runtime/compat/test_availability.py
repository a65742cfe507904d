"""What is installed and which devices there are."""

import sys
import types

import pytest
import torch

import orc.runtime
from orc.runtime.compat import colab
from orc.runtime.core import availability
from orc.runtime.core.availability import is_package


@pytest.fixture(autouse=True)
def no_memory():
    is_package.cache_clear()
    yield
    is_package.cache_clear()


def test_a_package_needs_a_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "left_behind").mkdir()
    (tmp_path / "real_one").mkdir()
    (tmp_path / "real_one/__init__.py").write_text("")
    assert is_package("real_one")
    assert not is_package("left_behind")
    assert not is_package("real_one.inner")
    assert not is_package("nothing_at.all")
    assert "real_one" not in sys.modules or sys.modules["real_one"].__file__


def test_every_question_has_an_answer():
    questions = [name for name in orc.runtime.__all__ if name.startswith("is_") and name.endswith("_available")]
    assert len(questions) > 40
    for name in questions:
        answer = getattr(orc.runtime, name)
        assert isinstance(answer(), bool), name
        assert answer.__doc__, name


def test_answers_here():
    assert orc.runtime.is_pytest_available()
    assert orc.runtime.is_fp16_available()
    assert orc.runtime.is_weights_only_available()
    assert orc.runtime.is_pippy_available()
    assert not orc.runtime.is_npu_available()
    assert orc.runtime.is_cuda_available() == torch.cuda.is_available()


def fake_module(monkeypatch, name, **members):
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_a_device_of_an_extension(monkeypatch):
    fake_module(monkeypatch, "torch_npu")
    fake_device = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 0)
    monkeypatch.setattr(torch, "npu", fake_device, raising=False)
    assert availability.is_npu_available()
    assert not availability.is_npu_available(check_device=True)
    fake_device.device_count = lambda: 2
    assert availability.is_npu_available(check_device=True)


def test_xla_knows_its_device(monkeypatch):
    assert not availability.is_torch_xla_available()
    is_package.cache_clear()
    fake_module(monkeypatch, "torch_xla")
    fake_module(monkeypatch, "torch_xla.runtime", device_type=lambda: "TPU")
    assert availability.is_torch_xla_available()
    assert availability.is_torch_xla_available(check_is_tpu=True)
    assert not availability.is_torch_xla_available(check_is_gpu=True)
    with pytest.raises(ValueError, match="cannot both be asked for"):
        availability.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_ipex_must_fit_torch(monkeypatch):
    import importlib.metadata

    fake_module(monkeypatch, "intel_extension_for_pytorch")
    major, minor = torch.__version__.split(".")[:2]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{major}.{minor}.100")
    assert availability.is_ipex_available()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.10.0")
    assert not availability.is_ipex_available()


def test_the_torch_xla_of_a_colab_notebook_is_that_of_its_torch(monkeypatch):
    with pytest.raises(RuntimeError, match="notebooks of Google Colab"):
        colab.install_xla()
    ran, status = [], types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(colab, "_in_colab", lambda: True)
    monkeypatch.setattr(colab.subprocess, "run", lambda words, check: ran.append(words[1:]) or status)
    colab.install_xla()
    colab.install_xla(upgrade=True)
    install = ["-m", "pip", "install"]
    version = torch.__version__.partition("+")[0]
    assert ran == [[*install, f"torch_xla[tpu]=={version}"], [*install, "--upgrade", "torch", "torch_xla[tpu]"]]
    status.returncode = 1
    with pytest.raises(RuntimeError, match=r"could not install torch_xla\[tpu\]"):
        colab.install_xla(upgrade=True)
