"""Number of GPUs of this machine, found without torch and without CUDA."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

_DEVICES = Path("/dev")


def visible_gpus(env: Mapping[str, str], devices: Path = _DEVICES) -> int:
    """Return the number of GPUs that a process with the variables *env* sees.

    ``CUDA_VISIBLE_DEVICES`` counts first; then the devices below *devices*, of which a container has its own only; then
    ``nvidia-smi``, where the driver has other devices (WSL).
    """
    if (chosen := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(_before_the_first_invalid(chosen))
    try:
        count = sum(1 for name in os.listdir(devices) if re.fullmatch(r"nvidia\d+", name))
    except OSError:
        count = 0
    return count or _by_nvidia_smi(env)


def _before_the_first_invalid(text: str) -> list[str]:
    """Return the devices that CUDA takes: those before the first that is none, which ``-1`` is used for."""
    found: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", word):
            break
        found.append(word)
    return found


def _by_nvidia_smi(env: Mapping[str, str]) -> int:
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None:
        return 0
    import subprocess

    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, env=dict(env), check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(1 for line in listed.stdout.splitlines() if line.startswith("GPU ")) if listed.returncode == 0 else 0
