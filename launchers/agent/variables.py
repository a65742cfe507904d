"""Environment variables of the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

# What the agent derives for its ranks. Inherited values (a job that starts a job) must never leak through.
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
DERIVED = (
    *_RANK_NAMES,
    *("MASTER_ADDR", "MASTER_PORT", "ORC_JOB_ID", "ORC_JOB_NAME", "ORC_ATTEMPT", "ORC_RESTART", "ORC_MARKER"),
    *("ORC_JOB_DIR", "ORC_ATTEMPT_DIR", "ORC_NODE_RANK", "ORC_NNODES", "ORC_NPROC", "ORC_RDZV_ID"),
    "TORCHELASTIC_RUN_ID",
    "ORC_LOGS_DIR",
    "ORC_TOKEN",  # what the ranks of one incarnation know each other by
    "ORC_GPUS",  # what the job asks for on each node, so that a rank that finds fewer says so
    "ORC_GANG",  # the marker of the attempt that a process runs without being one of its ranks
)


# What a job of another user gets of the environment that the service has: how programs are found and texts are written.
_OF_SERVICE = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


def without_own(environ: Mapping[str, str], *, of_service: bool = False) -> dict[str, str]:
    """Return the part of *environ* that a new job may inherit: nothing that an agent derives for its own ranks.

    With *of_service* it is a service's environment, and the job somebody else's: what a job needs, by name.
    """
    if of_service:
        return {name: value for name, value in environ.items() if name in _OF_SERVICE or name.startswith("LC_")}
    return {name: value for name, value in environ.items() if name not in DERIVED}


def prepend_path(env: dict[str, str], directory: str) -> None:
    """Put *directory* in front of PYTHONPATH, keeping what is there."""
    before = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{directory}{os.pathsep}{before}" if before else directory


def rank_variables(
    rank: int, local_rank: int, node: int, nnodes: int, nproc: int, addr: str, port: int
) -> dict[str, str]:
    """Return the variables that ``torch.distributed`` (``init_method="env://"``) reads."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nnodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "MASTER_ADDR": addr,
        "MASTER_PORT": str(port),
    }


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` for the known names only; every other brace stays as it is."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text
