"""Installation of torch_xla in Google Colab, whose machines come without it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that goes with the installed torch into a notebook of Google Colab.

    Args:
        upgrade: the newest torch and torch_xla instead; a torch that the notebook has imported is the old one until
            its runtime is started again.

    Raises:
        RuntimeError: this is no notebook of Google Colab, or pip fails.
    """
    if not _in_colab():
        raise RuntimeError("install_xla is for notebooks of Google Colab; elsewhere: pip install 'torch_xla[tpu]'")
    wanted = ["--upgrade", "torch", "torch_xla[tpu]"] if upgrade else [f"torch_xla[tpu]=={_matching()}"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=False)
    if done.returncode:
        raise RuntimeError(f"pip could not install {wanted[-1]}; it has said why above")


def _in_colab() -> bool:
    return importlib.util.find_spec("google") is not None and importlib.util.find_spec("google.colab") is not None


def _matching() -> str:
    """Return the version of torch_xla for the installed torch: they are released together."""
    from importlib.metadata import version

    return version("torch").partition("+")[0]
