"""Tasks that ``srun`` started directly, without another launcher in between."""

from __future__ import annotations

import re
from collections.abc import Mapping

from orc.runtime.core.environment import LaunchEnvironment, integer
from orc.runtime.core.errors import LaunchError

NAME = "slurm"
_PORTS = range(20000, 30000)  # below the usual ephemeral range (32768-60999), so that no client socket sits on it


def present(env: Mapping[str, str]) -> bool:
    """Only inside a job step: a batch script also has SLURM_PROCID and SLURM_NTASKS, but it runs once."""
    return "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env


def read(env: Mapping[str, str]) -> LaunchEnvironment:
    """SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID and the step's size.

    The address of rank 0 is the first node of the step and its port follows from job and step number, unless
    MASTER_ADDR and MASTER_PORT are set.
    """
    world = integer(env, "SLURM_STEP_NUM_TASKS")
    node = integer(env, "SLURM_NODEID", default=0)
    local_world = _tasks_on_node(env, node, world)
    address, port = env.get("MASTER_ADDR") or None, None
    if world > 1:
        if address is None:
            address = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")
        port = integer(env, "MASTER_PORT", default=_port(env))
    return LaunchEnvironment(
        NAME, integer(env, "SLURM_PROCID"), world, integer(env, "SLURM_LOCALID"), local_world, node, address, port
    )


def _tasks_on_node(env: Mapping[str, str], node: int, world: int) -> int:
    counts = task_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node < len(counts):
        return counts[node]
    nodes = integer(env, "SLURM_STEP_NUM_NODES", default=1)
    return max(world // nodes, 1)


def task_counts(text: str) -> list[int]:
    """Slurm's run-length form: ``2(x3),1`` is ``[2, 2, 2, 1]``. Raises `LaunchError` for anything else."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not understood")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[07-09,12],login`` starts with ``gpu07``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    if not match:
        raise LaunchError(
            f"the node list {nodelist!r} of this job step is not understood; set MASTER_ADDR to the host of rank 0"
        )
    return match[1] + (match[2] or "") + (match[3] or "")


def _port(env: Mapping[str, str]) -> int:
    job = integer(env, "SLURM_JOB_ID", default=0)
    step = integer(env, "SLURM_STEP_ID", default=0)
    return _PORTS[(job * 16 + step % 16) % len(_PORTS)]
