"""Processes that Open MPI's ``mpirun`` started."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from orc.runtime.core.environment import LaunchEnvironment, integer
from orc.runtime.core.errors import LaunchError

NAME = "openmpi"
_PORTS = range(20000, 30000)


def present(env: Mapping[str, str]) -> bool:
    """Open MPI numbers every process it starts."""
    return "OMPI_COMM_WORLD_RANK" in env


def read(env: Mapping[str, str]) -> LaunchEnvironment:
    """OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE.

    On one machine nothing else is needed: the port follows from the job's own number. On several machines Open MPI
    does not say where rank 0 runs: ``mpirun -x MASTER_ADDR=<host of rank 0>``.
    """
    rank, world = integer(env, "OMPI_COMM_WORLD_RANK"), integer(env, "OMPI_COMM_WORLD_SIZE")
    local_rank = integer(env, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_world = integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    address, port = env.get("MASTER_ADDR") or None, None
    if world > 1:
        if address is None:
            if local_world != world:
                raise LaunchError(
                    f"Open MPI started {world} processes on several machines, but MASTER_ADDR is not set; "
                    "add `-x MASTER_ADDR=<host of rank 0>` to mpirun"
                )
            address = "127.0.0.1"
        port = integer(env, "MASTER_PORT", default=_port(env))
    # Ranks are numbered machine by machine unless mpirun maps them otherwise; the index only names the machine.
    node = integer(env, "ORC_NODE_RANK", default=(rank - local_rank) // local_world if local_world else 0)
    return LaunchEnvironment(NAME, rank, world, local_rank, local_world, node, address, port)


def _port(env: Mapping[str, str]) -> int:
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("OMPI_MCA_orte_hnp_uri", "")
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
