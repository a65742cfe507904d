"""The ``env://`` convention: torchrun, Kubernetes operators, and anything else that sets RANK and WORLD_SIZE."""

from __future__ import annotations

from collections.abc import Mapping

from orc.runtime.core.environment import LaunchEnvironment, integer
from orc.runtime.core.errors import LaunchError

NAME = "torchrun"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def present(env: Mapping[str, str]) -> bool:
    """RANK alone, or WORLD_SIZE above 1 alone, is a half-made launch: claimed here so that `read` can refuse it."""
    return "RANK" in env or env.get("WORLD_SIZE", "1") not in ("", "1")


def read(env: Mapping[str, str]) -> LaunchEnvironment:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK or NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Without LOCAL_RANK the processes are taken to share this machine when MASTER_ADDR is a loopback address, and to
    run one per machine otherwise (what Kubernetes' PyTorchJob does).
    """
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if not env.get(other):
            raise LaunchError(
                f"{name}={env.get(name, '')} is set but {other} is not: a process needs both, or neither to run alone; "
                "start the script with `orc launch -n N script.py` or torchrun, or unset the variable"
            )
    rank, world = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    address, port = env.get("MASTER_ADDR") or None, None
    if world > 1:
        if address is None or not env.get("MASTER_PORT"):
            missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
            raise LaunchError(
                f"WORLD_SIZE={world} but {missing} is not set: the processes cannot find each other; "
                "set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there"
            )
        port = integer(env, "MASTER_PORT")
    if env.get("LOCAL_RANK") or env.get("LOCAL_WORLD_SIZE"):
        local_rank = integer(env, "LOCAL_RANK")
        local_world = integer(env, "LOCAL_WORLD_SIZE", default=max(local_rank + 1, 1))
    elif world == 1 or address in _LOOPBACK:
        local_rank, local_world = rank, world
    else:
        local_rank, local_world = 0, 1
    guess = rank // local_world if local_world else 0
    node = integer(env, "GROUP_RANK", default=integer(env, "NODE_RANK", default=guess))
    return LaunchEnvironment(NAME, rank, world, local_rank, local_world, node, address, port)
