"""Place of a foreground launch in a run that is larger than it: several machines, or an MPI or Slurm step.

Both give the ranks of this launch numbers that continue those of others, and one address where all of them meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orc.launchers.agent import network
from orc.launchers.agent.variables import rank_variables
from orc.launchers.errors import LaunchError
from orc.runtime.core.errors import LaunchError as RuntimeLaunchError
from orc.runtime.launch.environment import hydra, openmpi, slurm

_LOOPBACK = ("127.", "localhost", "::1")
DEFAULT_PORT = 29500  # what torchrun takes, and every example of a run on several machines


@dataclass(frozen=True)
class World:
    """World that the ranks of a launch belong to: where they stand in it, and where rank 0 listens."""

    size: int
    first_rank: int
    local_size: int  # ranks on this machine
    addr: str
    port: int
    node: int = 0
    first_local_rank: int = 0

    def variables(self, index: int) -> dict[str, str]:
        """Return the variables of the rank that is number *index* of this launch."""
        rank, local = self.first_rank + index, self.first_local_rank + index
        found = rank_variables(rank, local, self.node, 1, self.size, self.addr, self.port)
        # All ranks have one role, so its numbers are theirs.
        of_role = {"ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(self.size)}
        return {**found, **of_role, "LOCAL_WORLD_SIZE": str(self.local_size)}

    def listening(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that name the interface on which the ranks reach the others, but for those *given*."""
        if self.addr.startswith(_LOOPBACK):
            found = network.on_loopback()
        elif self.local_size == self.size:
            return {}
        else:
            found = network.towards(network.interface_of(network.own_address([self.addr])))
        return {name: value for name, value in found.items() if name not in given}


def alone(nprocs: int, port: int) -> World:
    """Return the world of a launch that has no other part."""
    return World(nprocs, 0, nprocs, "127.0.0.1", port)


def joined(env: Mapping[str, str]) -> World | None:
    """Return the world of the MPI or Slurm step that this process is one of several of; `None` outside of one.

    Raises `LaunchError` when its variables are incomplete.
    """
    if "ORC_MARKER" in env:
        return None  # a rank of a job that starts something of its own
    for platform in (openmpi, hydra, slurm):
        if platform.present(env):
            try:
                found = platform.read(env)
            except RuntimeLaunchError as error:
                raise LaunchError(str(error)) from None
            if found.world_size < 2 or found.master_addr is None or found.master_port is None:
                return None
            return World(
                size=found.world_size,
                first_rank=found.rank,
                local_size=found.local_world_size,
                addr=found.master_addr,
                port=found.master_port,
                node=found.node_rank,
                first_local_rank=found.local_rank,
            )
    return None


def of_machines(num_processes: int, num_machines: int, machine_rank: int, ip: str | None, port: int | None) -> World:
    """Return the world of one launch on each of several machines, with as many processes on each.

    Raises:
        LaunchError: the numbers do not fit together, or nobody said where machine 0 is.
    """
    if machine_rank >= num_machines:
        raise LaunchError(f"--machine_rank {machine_rank}: machines count from 0, and --num_machines is {num_machines}")
    if num_processes % num_machines:
        raise LaunchError(
            f"--num_processes {num_processes} is the number over all machines, and not a multiple of "
            f"--num_machines {num_machines}"
        )
    if not ip:
        raise LaunchError(
            f"--num_machines {num_machines} needs --main_process_ip, the address of machine 0",
            hint="Or let orc find it: a job with resources.nodes, on a cluster of kind ssh or slurm.",
        )
    local = num_processes // num_machines
    return World(num_processes, machine_rank * local, local, ip, port or DEFAULT_PORT, machine_rank)
