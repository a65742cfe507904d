"""Rank, world size and job that a launch environment gives a process, and the reading of its variables. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from orc.runtime.core.errors import LaunchError


class JobFacts(NamedTuple):
    """Name, attempt and folders of the orc job that this process belongs to; all `None` or zero outside of one."""

    id: str | None = None
    name: str | None = None
    marker: str | None = None
    attempt: int = 0  # from 1 inside a job
    restart: int = 0  # requeues of the same attempt
    job_dir: str | None = None
    attempt_dir: str | None = None
    gpus: int = 0  # that the job asks for on each node


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place of this process among its peers, as the platform states it.

    Ranks count from 0. ``node_rank`` is the index of the machine. ``master_addr``/``master_port`` locate the store of
    rank 0 and are `None` in a single process.
    """

    platform: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    job: JobFacts = field(default_factory=JobFacts)

    def __post_init__(self) -> None:
        for what, index, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if size < 1:
                raise LaunchError(f"{self.platform}: a world of {size} processes makes no sense ({what} {index})")
            if not 0 <= index < size:
                raise LaunchError(
                    f"{self.platform}: {what} {index} is not below the number of processes, {size}; "
                    "every process must be started with variables of the same launch"
                )


class Platform(Protocol):
    """A module of this folder: recognises its platform and reads its variables."""

    NAME: str

    def present(self, env: Mapping[str, str]) -> bool:
        """Return whether this platform set the variables in *env*."""
        ...

    def read(self, env: Mapping[str, str]) -> LaunchEnvironment:
        """The facts in *env*. Raises `LaunchError` when they are incomplete or contradict each other."""
        ...


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number in variable *name*. Raises `LaunchError` when it is missing without default, or no number."""
    text = env.get(name)
    if text is None or text == "":
        if default is None:
            raise LaunchError(f"{name} is not set; start the script with `orc launch`, torchrun, srun or mpirun")
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number") from None
