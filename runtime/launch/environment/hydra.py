"""Processes that the ``mpirun`` of Intel MPI or MPICH (Hydra) started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from orc.runtime.core.environment import LaunchEnvironment, integer
from orc.runtime.core.errors import LaunchError

NAME = "hydra"
_PORTS = range(20000, 30000)
_PORT = 29500  # torchrun's, where nothing that all machines know tells two runs apart


def present(env: Mapping[str, str]) -> bool:
    """Hydra numbers every process, and those of a machine: Slurm's own start of MPI programs does only the first."""
    return "PMI_RANK" in env and "MPI_LOCALRANKID" in env


def read(env: Mapping[str, str]) -> LaunchEnvironment:
    """PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS.

    On one machine the port follows from the process that started all of them; on several, ``MASTER_ADDR`` says where
    rank 0 runs.
    """
    rank, world = integer(env, "PMI_RANK"), integer(env, "PMI_SIZE")
    local_rank, local_world = integer(env, "MPI_LOCALRANKID"), integer(env, "MPI_LOCALNRANKS", default=world)
    address, port = env.get("MASTER_ADDR") or None, None
    if world > 1:
        if address is None:
            if local_world != world:
                raise LaunchError(
                    f"mpirun started {world} processes on several machines, but MASTER_ADDR is not set; "
                    "export MASTER_ADDR=<host of rank 0> before mpirun"
                )
            address = "127.0.0.1"
        own = _PORTS[os.getppid() % len(_PORTS)] if local_world == world else _PORT
        port = integer(env, "MASTER_PORT", default=own)
    node = integer(env, "ORC_NODE_RANK", default=(rank - local_rank) // local_world if local_world else 0)
    return LaunchEnvironment(NAME, rank, world, local_rank, local_world, node, address, port)
