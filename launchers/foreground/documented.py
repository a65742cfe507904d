"""Documented options of `accelerate launch`, turned into a foreground launch: its ranks, their world and variables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orc.launchers.accelerate.merge import Values, variables
from orc.launchers.agent.gpus import amd_gpu_count, nvidia_smi
from orc.launchers.errors import LaunchError
from orc.launchers.foreground.launch import LocalLaunch
from orc.launchers.foreground.tee import Streams
from orc.launchers.foreground.world import World, joined, of_machines
from orc.runtime.core import fp8_settings, parallelism_settings

_DEVICES = Path("/dev")


def visible_gpus(env: Mapping[str, str], devices: Path = _DEVICES) -> int:
    """Return the number of GPUs that a process with the variables *env* sees.

    ``CUDA_VISIBLE_DEVICES`` (or AMD's ``HIP_VISIBLE_DEVICES``) counts first; then the devices below *devices*, of which
    a container has its own only; then AMD's, and those of ``nvidia-smi``, where the driver has other devices (WSL).
    """
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if (chosen := env.get(name)) is not None:
            return len(_before_the_first_invalid(chosen))
    try:
        count = sum(1 for name in os.listdir(devices) if re.fullmatch(r"nvidia\d+", name))
    except OSError:
        count = 0
    return count or amd_gpu_count(str(devices.parent).rstrip("/")) or _by_nvidia_smi(env)


def _before_the_first_invalid(text: str) -> list[str]:
    """Return the devices that CUDA takes: those before the first that is none, which ``-1`` is used for."""
    found: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", word):
            break
        found.append(word)
    return found


def _by_nvidia_smi(env: Mapping[str, str]) -> int:
    try:
        text, fault = nvidia_smi(env.get("PATH") or os.defpath, 20.0, "-L") or ("", "")
    except OSError:
        return 0
    return 0 if fault else sum(line.startswith("GPU ") for line in text.splitlines())


@dataclass
class Documented:
    """Launch that documented options describe: the request, and the notes on it for people."""

    request: LocalLaunch
    notes: list[str] = field(default_factory=list)


def documented(
    request: LocalLaunch,
    values: Values,
    env: Mapping[str, str],
    *,
    nproc: int | None = None,
    count: Callable[[Mapping[str, str]], int] = visible_gpus,
) -> Documented:
    """Return *request* with everything that *values* set.

    Args:
        request: the program and what no documented option says.
        values: see `orc.launchers.accelerate.merge`.
        env: the environment of this process.
        nproc: processes of this machine, where that was said.
        count: gives the number of GPUs that an environment sees.

    Raises:
        LaunchError: settings that cannot be, or processes that do not fit the machines, the GPUs or an MPI step.
    """
    own = {**variables(values), **request.env}
    _check_fp8(request, {**env, **own})
    found = Documented(request)
    if note := kernel_note(os.uname().release):
        found.notes.append(note)
    world, nprocs = _ranks(found, values, env, {**env, **own}, nproc, count)
    _check_layout({**env, **own}, nprocs if world is None else world.size)
    if values.get("tee") is not None or values.get("redirects") is not None or values.get("log_dir") is not None:
        request = _logs(request, values, found.notes)
    found.request = replace(
        request,
        nprocs=nprocs,
        world=world,
        env=own,
        module=values.on("module"),
        no_python=values.on("no_python"),
        quiet=values.on("quiet"),
        max_restarts=values.get("max_restarts", 0),
    )
    return found


def _check_fp8(request: LocalLaunch, env: Mapping[str, str]) -> None:
    """Raise `LaunchError` when ranks are to train in fp8 and the library for it is not installed."""
    if env.get("ORC_MIXED_PRECISION", env.get("ACCELERATE_MIXED_PRECISION")) != "fp8":
        return
    if request.python != sys.executable:  # another installation: its ranks know
        return
    try:
        wanted = fp8_settings.from_environment(env).get("backend")
        fp8_settings.choose(wanted, fp8_settings.installed())
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _check_layout(env: Mapping[str, str], processes: int) -> None:
    """Raise `LaunchError` when the sizes of parallelism do not make the number of *processes*."""
    try:
        problem = parallelism_settings.problem(parallelism_settings.from_environment(env), processes)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    if problem:
        raise LaunchError(problem)


def kernel_note(release: str) -> str | None:
    """Return the documented warning for a Linux kernel older than 5.5, below which ranks can hang."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= (5, 5):
        return None
    return f"the Linux kernel {release} is older than 5.5, with which ranks have been seen to hang; a newer one helps"


def _ranks(
    found: Documented,
    values: Values,
    env: Mapping[str, str],
    seen: Mapping[str, str],
    nproc: int | None,
    count: Callable[[Mapping[str, str]], int],
) -> tuple[World | None, int]:
    """Return the world of the ranks, if they are not all of it, and their number here."""
    total, machines = values.get("num_processes"), values.get("num_machines", 1)
    if nproc is not None and "num_processes" in values.given and nproc * machines != total:
        raise LaunchError(f"-n {nproc} on each of {machines} machines, and --num_processes {total} in all")
    total = nproc * machines if nproc is not None else total
    step = joined(env)
    if step is not None and (machines == 1 or total == step.size or step.size != machines):
        asked = nproc is not None or "num_processes" in values.given
        if asked and total != step.size:
            raise LaunchError(
                f"mpirun or srun has started {step.size} of these launches, and {total} processes were asked for",
                hint="Leave the number out: each launch below mpirun or srun is one process of the run.",
            )
        return step, 1
    gpus = 0 if values.on("cpu") else count(seen)
    multi_gpu = "--multi_gpu" if "multi_gpu" in values.given else "distributed_type of the configuration file"
    if values.on("multi_gpu") and not gpus:
        raise LaunchError(
            f"{multi_gpu}: this machine has no GPU that the processes could see", hint="--cpu trains on it."
        )
    if total is None:
        total = max(gpus, 1) * machines
        if gpus > 1:
            found.notes.append(f"{gpus} GPUs, one process on each; --num_processes takes another number")
    elif values.on("multi_gpu") and (here := -(-total // machines)) > gpus:
        raise LaunchError(f"{multi_gpu}: {here} processes, and this machine has {gpus} GPUs")
    if machines > 1:
        rank = values.get("machine_rank", 0)
        if step is not None and "machine_rank" not in values.given:
            rank = step.first_rank  # srun has started one launch on each machine
        ip = values.get("main_process_ip") or env.get("MASTER_ADDR") or (step.addr if step else None)
        port = values.get("main_process_port") or _port(env)
        world = of_machines(total, machines, rank, ip, port)
        return world, world.local_size
    if port := values.get("main_process_port"):
        return World(total, 0, total, values.get("main_process_ip") or "127.0.0.1", port), total
    return None, total


def _port(env: Mapping[str, str]) -> int | None:
    text = env.get("MASTER_PORT", "")
    return int(text) if text.isdecimal() else None


def _logs(request: LocalLaunch, values: Values, notes: list[str]) -> LocalLaunch:
    tee, redirects = values.get("tee"), values.get("redirects")
    folder = values.get("log_dir")
    if folder is None:
        import tempfile

        folder = tempfile.mkdtemp(prefix="orc-launch-")
        notes.append(f"logs are in {folder}; --log_dir takes another folder")
    # Without a choice both streams of every rank are copied; a choice of redirects alone copies nothing else.
    copied = streams("--tee", tee or "0") if tee is not None or redirects is not None else request.tee
    return replace(request, log_dir=Path(folder), tee=copied, redirects=streams("--redirects", redirects or "0"))


def streams(flag: str, text: Any) -> Streams:
    """Return the streams that ``--tee`` or ``--redirects`` choose: ``3``, or ``0:1,1:3`` by local rank.

    Raises `LaunchError`.
    """
    parts = str(text).split(",")
    if parts == [parts[0]] and parts[0] in ("0", "1", "2", "3"):
        return int(parts[0])
    found: dict[int, int] = {}
    for part in parts:
        rank, colon, stream = part.partition(":")
        if not colon or not rank.strip().isdecimal() or stream.strip() not in ("0", "1", "2", "3"):
            raise LaunchError(f"{flag} {text!r}: expected 0, 1, 2 or 3, or such a number by rank: 0:3,1:1")
        found[int(rank)] = int(stream)
    return found
