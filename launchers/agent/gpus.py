"""GPUs of this machine, as jobs take and give them back: named by what CUDA_VISIBLE_DEVICES takes."""

from __future__ import annotations

import os
import re

from orc.launchers.agent.errors import LaunchFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIST_S = 60.0  # the driver of a machine that keeps none loaded takes seconds for each GPU
_LINE = re.compile(r"\s*(GPU|MIG) .*\(UUID: ([\w/.-]+)\)")


def gpu_count(root: str = "") -> int | None:
    """Return the number of GPUs of NVIDIA's or AMD's drivers; `None` where only a library can tell (WSL)."""
    import glob

    if os.path.exists(f"{root}/dev/dxg"):
        return None
    nvidia = glob.glob(f"{root}/proc/driver/nvidia/gpus/*") or glob.glob(f"{root}/dev/nvidia[0-9]*")
    return len(nvidia) + amd_gpu_count(root)


def amd_gpu_count(root: str = "") -> int:
    """Return the number of GPUs of AMD's driver."""
    import glob

    count = 0
    for path in glob.glob(f"{root}/sys/class/kfd/kfd/topology/nodes/*/gpu_id"):
        try:
            with open(path) as file:
                count += file.read().strip() not in ("", "0")  # processors are in that list, too
        except OSError:
            continue  # a container may not look at GPUs that it does not have
    return count


def gpu_names(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that jobs may take here, in the order of the bus.

    They are the UUIDs that nvidia-smi lists, of a GPU that is divided those of its parts (MIG); where there is no
    nvidia-smi the numbers of what the drivers list. CUDA_VISIBLE_DEVICES of *env* leaves some of them out.
    Raises `LaunchFailure` where nvidia-smi fails: under other names two jobs would take the same GPU.
    """
    listed = _listing(env.get("PATH") or os.defpath)
    boards = [[str(index)] for index in range(gpu_count() or 0)] if listed is None else _boards(listed)
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    return [name for board in boards for name in board] if chosen is None else _chosen(boards, chosen)


def own_part(env: Mapping[str, str], local_rank: int, nproc: int) -> dict[str, str]:
    """Return what makes one of *nproc* ranks see its own of several MIG devices: CUDA takes the first that is shown."""
    shown = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if nproc < 2 or local_rank >= len(shown) or not any(name.startswith("MIG-") for name in shown):
        return {}
    return {"CUDA_VISIBLE_DEVICES": shown[local_rank]}


def nvidia_smi(path: str, limit_s: float, *arguments: str) -> tuple[str, str] | None:
    """Return what the nvidia-smi on *path* prints, and why it failed: one line, empty where it did not.

    `None` without that program. Raises `OSError` where it cannot be started, or does not end within *limit_s*.
    """
    import shutil
    import subprocess

    if (program := shutil.which("nvidia-smi", path=path)) is None:
        return None
    try:
        done = subprocess.run([program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from None
    text, said = (stream.decode("utf-8", "replace").strip() for stream in (done.stdout, done.stderr))
    reasons = (said or text or f"exit status {done.returncode}").splitlines()
    return text, reasons[-1] if done.returncode else ""


def _listing(path: str) -> str | None:
    """Return what ``nvidia-smi -L`` prints; `None` without that program."""
    try:
        text, fault = nvidia_smi(path, LIST_S, "-L") or (None, "")
    except OSError as error:
        fault = str(error)
    if fault:
        raise LaunchFailure(f"nvidia-smi -L: {fault}")
    return text


def _boards(listed: str) -> list[list[str]]:
    """Return for each GPU in the output of ``nvidia-smi -L`` its UUID, or those of its parts."""
    boards: list[tuple[str, list[str]]] = []
    for kind, uuid in (match.groups() for match in map(_LINE.match, listed.splitlines()) if match):
        if kind == "GPU":
            boards.append((uuid, []))
        elif boards:
            boards[-1][1].append(uuid)
    return [parts or [uuid] for uuid, parts in boards]


def _chosen(boards: Sequence[Sequence[str]], chosen: str) -> list[str]:
    """Return the GPUs that *chosen* names by number or by the beginning of a UUID, as CUDA does: up to the first that
    is none.
    """
    found: list[str] = []
    names = [name for board in boards for name in board]
    for word in (part.strip() for part in chosen.split(",")):
        if word.isdigit():
            named = list(boards[int(word)]) if int(word) < len(boards) else []
        else:
            named = [name for name in names if word and name.startswith(word)]
        if not named:
            break
        found += [name for name in named if name not in found]
    return found
