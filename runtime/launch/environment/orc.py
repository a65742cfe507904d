"""Processes that an orc agent started: the ``env://`` variables plus the facts of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orc.runtime.core.environment import JobFacts, LaunchEnvironment, integer
from orc.runtime.launch.environment import torchrun

NAME = "orc"


def present(env: Mapping[str, str]) -> bool:
    """An agent sets ORC_MARKER; RANK is missing when a launcher of another platform (mpirun) started the ranks."""
    return "ORC_MARKER" in env and "RANK" in env


def read(env: Mapping[str, str]) -> LaunchEnvironment:
    """Like torchrun's, with ORC_NODE_RANK as the index of the machine."""
    launch = torchrun.read(env)
    return replace(launch, platform=NAME, node_rank=integer(env, "ORC_NODE_RANK", default=launch.node_rank))


def job_facts(env: Mapping[str, str]) -> JobFacts:
    """The job this process belongs to, whoever started the ranks."""
    return JobFacts(
        id=env.get("ORC_JOB_ID"),
        name=env.get("ORC_JOB_NAME"),
        marker=env.get("ORC_MARKER"),
        attempt=integer(env, "ORC_ATTEMPT", default=0),
        restart=integer(env, "ORC_RESTART", default=0),
        job_dir=env.get("ORC_JOB_DIR"),
        attempt_dir=env.get("ORC_ATTEMPT_DIR"),
        gpus=integer(env, "ORC_GPUS", default=0),
    )
